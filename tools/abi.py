#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a program compiled against the headers relies on - functions, sizes and offsets of structs, values of enums - is
that of tests/data/abi.txt: abi.py [--write] [--cc CC] [--record FILE] HEADER...

A small C program prints what this compiler makes of the headers. --write renews the record; what a change means is said
by the head of the record, and belongs into NEWS.md.
"""
import argparse
import difflib
import os
import subprocess
import sys
import tempfile

import headers

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HEAD = """\
# What programs compiled against the public headers rely on (64-bit, little-endian). Compared by the test tree.abi; renewed by
#     python3 tools/abi.py --write include/anchorkv/*.h
#
# Before 1.0.0 a difference raises the minor version, and with it the symbol version ANCHORKV_<major>.<minor> of the shared
# library (cmake/anchorkv.map.in): the loader then refuses programs linked against the older one instead of running them
# on structs of another size. From 1.0.0 on new functions, new enum values and fields added at the end of a struct that begins
# with struct_size are compatible (its _init keeps filling the old size under its old symbol version); all else raises the
# major version. akv_experimental.h is outside of any promise.
"""


def program(paths):
    """C source that prints the record of these headers."""
    lines = ["#include <stdio.h>"]
    lines += ['#include "%s"' % os.path.abspath(path) for path in paths]
    lines.append("#define ALIGN(t) _Alignof(t)")
    lines.append("int main(void) {")

    def put(form, *values):
        lines.append('printf("%s\\n"%s);' % (form.replace('"', '\\"'), "".join(", " + value for value in values)))

    for path in paths:
        put("")
        put("header " + os.path.basename(path))
        for item in headers.parse(path)[1]:
            if item.kind in ("function", "callback"):
                put("%s %s" % (item.kind, item.text.rstrip(";").replace("%", "%%")))
            elif item.kind == "constant" and not item.name.startswith("AKV_VERSION"):
                put("constant %s %%lld" % item.name, "(long long)%s" % item.name)
            elif item.kind == "opaque":
                put("opaque " + item.name)
            elif item.kind == "enum":
                put("enum %s size %%zu" % item.name, "sizeof(%s)" % item.name)
                for name, _, _ in item.members:
                    put("  %s %%lld" % name, "(long long)%s" % name)
            elif item.kind == "struct":
                put("struct %s size %%zu align %%zu" % item.name, "sizeof(%s)" % item.name, "ALIGN(%s)" % item.name)
                for name, declared, _ in item.members:
                    put("  %%zu %%zu %s" % declared.replace("%", "%%"), "offsetof(%s, %s)" % (item.name, name),
                        "sizeof(((%s *)0)->%s)" % (item.name, name))
    lines.append("return 0; }")
    return "\n".join(lines) + "\n"


def dump(paths, compiler):
    with tempfile.TemporaryDirectory() as folder:
        source, binary = os.path.join(folder, "abi.c"), os.path.join(folder, "abi")
        with open(source, "w", encoding="utf-8") as stream:
            stream.write(program(paths))
        subprocess.run([compiler, "-std=c11", source, "-o", binary], check=True)
        return HEAD + subprocess.run([binary], check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--write", action="store_true", help="renew the record")
    parser.add_argument("--cc", default="cc")
    parser.add_argument("--record", default=os.path.join(ROOT, "tests", "data", "abi.txt"))
    parser.add_argument("headers", nargs="+")
    options = parser.parse_args()
    text = dump(sorted(options.headers), options.cc)
    if options.write:
        with open(options.record, "w", encoding="utf-8") as stream:
            stream.write(text)
        print("%s: %d lines" % (options.record, text.count("\n")))
        return 0
    with open(options.record, encoding="utf-8") as stream:
        record = stream.read()
    if record == text:
        print("%d lines as recorded" % text.count("\n"))
        return 0
    sys.stdout.writelines(line + "\n" for line in difflib.unified_diff(
        record.split("\n"), text.split("\n"), "recorded", "now", lineterm="", n=3))
    print("\nThe public headers say something else than %s (- recorded, + now; struct fields: offset, size).\n"
          "If that is meant, say so in NEWS.md and run: python3 tools/abi.py --write include/anchorkv/*.h\n"
          "The head of that file says which version must rise." % options.record)
    return 1


if __name__ == "__main__":
    sys.exit(main())
