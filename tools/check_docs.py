#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every public function and type has a comment: check_docs.py HEADER...

A declaration is documented when, without a blank line between, a comment stands above it or above the declarations it
follows, or when a comment ends its own line. Functions named akv_X_init are exempt: one rule in the head of
anchorkv.h describes them all.
"""
import re
import sys


def undocumented(path):
    with open(path, encoding="utf-8") as stream:
        lines = stream.read().split("\n")
    documented = False  # a comment stands above, and no blank line has come since
    in_comment = False
    depth = 0  # inside a struct or enum body
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if in_comment:
            in_comment = "*/" not in text
            documented = True
        elif text.startswith("/*"):
            in_comment = "*/" not in text
            # A ruled-off section heading is not the documentation of what follows it.
            documented = not re.match(r"/\* -{10,}", text)
        elif not text:
            documented = documented and depth > 0
        else:
            if depth == 0 and text.startswith("AKV_API"):
                name = re.search(r"(akv_\w+)\(", text)
                trailing = re.search(r"\)\s*;\s*/\*", text)
                if name and not (documented or trailing or name.group(1).endswith("_init")):
                    yield number, name.group(1)
            depth += text.count("{") - text.count("}")


def main():
    functions = 0
    bad = 0
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8") as stream:
            functions += len(re.findall(r"^AKV_API .*akv_\w+\(", stream.read(), re.MULTILINE))
        for number, name in undocumented(path):
            print("%s:%d: %s has no comment above it" % (path, number, name), file=sys.stderr)
            bad += 1
    if functions == 0:
        print("no public function found", file=sys.stderr)
        return 1
    if bad == 0:
        print("%d public functions, all documented" % functions)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
