#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/api.md from the comments of the public headers: api.py [--write] [--page FILE] HEADER...

Without --write it compares, and fails when the page is not what the headers say. In both it fails when something public
has no comment: functions (but for akv_X_init, which one rule describes), types, enum values, fields (but for struct_size). A
field counts as described, too, where another struct of the header or of anchorkv.h has the same one, described; the page says
"as in" that struct.
"""
import argparse
import os
import re
import sys

import headers

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HEAD = """\
# API reference

Made from the comments of `include/anchorkv/` by `python3 tools/api.py --write include/anchorkv/*.h`; do not edit. The test
`tree.api` fails when this page is not what the headers say. A first program is in [tutorial.md](tutorial.md), the meaning of words in
[terms.md](terms.md).
"""


def escape(text):
    return re.sub(r"([*_<|])", r"\\\1", text)


def code(name):
    return "`%s`" % name


def prose(comment):
    """A comment as Markdown: indented lines (tables of parameters, formulas, code) stay as they are, the rest is text."""
    out, block, kind = [], [], None

    def flush():
        if not block:
            return
        if kind == "code":
            margin = min(len(line) - len(line.lstrip()) for line in block if line)
            out.append("```text\n" + "\n".join(line[margin:] for line in block).rstrip() + "\n```")
        else:
            out.append(escape("\n".join(block)))
        block.clear()

    for line in comment.split("\n"):
        indented = line.startswith("  ") and not re.match(r" *- ", line) and not (kind == "list")
        now = "list" if re.match(r" *- ", line) or (kind == "list" and line.startswith("  ")) else "code" if indented else "text"
        if not line.strip():
            if kind != "code":
                flush()
                kind = None
            elif block:
                block.append("")
            continue
        if now != kind:
            while block and not block[-1]:
                block.pop()
            flush()
            kind = now
        block.append(re.sub(r"^ {2}(?=- )", "", line) if kind == "list" else line)
    flush()
    return "\n\n".join(out)


def sentence(text):
    """The text with a capital in front, unless it begins with the name of something."""
    return text if re.match(r"\w(\W|$)|\w*_", text) else text[:1].upper() + text[1:]


def titled(item):
    """The comment without the "name() - " it may begin with."""
    return sentence(re.sub(r"^akv_\w+\(\) - ", "", item.comment or ""))


def wrapped(declaration):
    """A prototype in lines of at most 100 columns."""
    text = declaration.rstrip(";") + ";"
    if len(text) <= 100:
        return text
    start, arguments = text.split("(", 1)
    lines, indent = [start + "("], " " * 4
    for piece in re.split(r"(?<=,) ", arguments):
        if len(lines[-1]) + 1 + len(piece) > 100:
            lines.append(indent)
        lines[-1] += piece if lines[-1].endswith("(") or not lines[-1].strip() else " " + piece
    return "\n".join(lines)


class Page:
    def __init__(self, paths):
        # anchorkv.h first: the others build on it
        self.paths = sorted(paths, key=lambda path: (os.path.basename(path) != "anchorkv.h", path))
        self.parsed = [(os.path.basename(path), path, *headers.parse(path)) for path in self.paths]
        self.missing = []
        self.described = {}  # (header, "type field") -> the first struct that describes it
        self.functions = 0
        for header, _, _, items in self.parsed:
            for item in items:
                for _, declared, comment in item.members if item.kind == "struct" else ():
                    if comment:
                        self.described.setdefault((header, declared), item.name)

    def elsewhere(self, path, declared):
        """The struct of the same header, or else of anchorkv.h, that describes this field."""
        found = [self.described.get((header, declared)) for header in (os.path.basename(path), "anchorkv.h")]
        return found[0] or found[1]

    def need(self, path, item, what=""):
        self.missing.append("%s:%d: %s has no comment" % (path, item.line, what or item.name))

    def struct(self, path, item):
        rows = ["| field | meaning |", "| --- | --- |"]
        previous = None
        for name, declared, comment in item.members:
            if name == "struct_size":
                meaning = "filled by the _init function"
            elif comment is not None and comment == previous:
                meaning = "likewise"
            elif comment is not None:
                meaning = re.sub(r"\s*\n\s*", " ", comment)
            elif self.elsewhere(path, declared):
                meaning = "as in %s" % self.elsewhere(path, declared)
            else:
                meaning = ""
                self.need(path, item, "%s.%s" % (item.name, name))
            previous = comment
            rows.append("| %s | %s |" % (code(declared.replace("|", "\\|")), escape(meaning)))
        return "\n".join(rows)

    def enum(self, path, item):
        rows = ["| value | | meaning |", "| --- | --- | --- |"]
        number = -1
        for name, value, comment in item.members:
            number = int(value, 0) if value is not None else number + 1
            if not comment and not item.comment:
                self.need(path, item, name)
            rows.append("| %s | %d | %s |" % (code(name), number, escape(re.sub(r"\s*\n\s*", " ", comment or ""))))
        return "\n".join(rows)

    def item(self, path, item, group):
        if item.kind == "section":
            return "### " + item.name[0].upper() + item.name[1:]
        if item.kind in ("function", "opaque", "callback"):
            self.functions += sum(one.kind == "function" for one in group)
            initialise = all(one.name.endswith("_init") for one in group)
            if not item.comment and not initialise:
                for one in group:
                    if not one.note:
                        self.need(path, one)
            parts = ["#### " + ", ".join(code(one.name) for one in group)]
            parts.append("```c\n%s\n```" % "\n".join(wrapped(one.text) for one in group))
            if item.comment:
                parts.append(prose(titled(item)))
            elif initialise and not item.note:
                parts.append("Sets `struct_size` and the defaults.")
            for one in group:
                if one.note:
                    parts.append((code(one.name) + ": " if len(group) > 1 else "") + prose(one.note) + ".")
            return "\n\n".join(parts)
        if not item.comment and item.kind == "struct":
            self.need(path, item)
        parts = ["#### " + code(item.name)]
        if item.kind == "constant":
            return "%s = `%s`. %s" % (code(item.name), item.text, escape(item.note or item.comment or ""))
        if item.comment:
            parts.append(prose(titled(item)))
        if item.kind == "struct":
            parts.append(self.struct(path, item))
        if item.kind == "enum":
            parts.append(self.enum(path, item))
        return "\n\n".join(parts)

    def render(self):
        out = [HEAD.rstrip()]
        for name, path, opening, items in self.parsed:
            out.append("## " + name)
            out.append(prose(sentence(re.sub(r"^%s - " % re.escape(name), "", opening))))
            at = 0
            while at < len(items):
                group = [items[at]]
                together = ("function", "opaque")
                while (at + len(group) < len(items) and items[at].kind in together and items[at].comment
                       and items[at + len(group)].kind in together and items[at + len(group)].comment == items[at].comment):
                    group.append(items[at + len(group)])
                if not (items[at].kind == "constant" and items[at].name.startswith("AKV_VERSION")):
                    out.append(self.item(path, items[at], group))
                at += len(group)
        return "\n\n".join(part for part in out if part) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--write", action="store_true", help="renew the page")
    parser.add_argument("--page", default=os.path.join(ROOT, "docs", "api.md"))
    parser.add_argument("headers", nargs="+")
    options = parser.parse_args()
    page = Page(options.headers)
    text = page.render()
    if page.functions == 0:
        print("no public function found", file=sys.stderr)
        return 1
    if page.missing:
        print("\n".join(page.missing), file=sys.stderr)
        return 1
    if options.write:
        with open(options.page, "w", encoding="utf-8") as stream:
            stream.write(text)
    else:
        with open(options.page, encoding="utf-8") as stream:
            if stream.read() != text:
                print("%s is not what the headers say; run: python3 tools/api.py --write include/anchorkv/*.h" % options.page,
                      file=sys.stderr)
                return 1
    print("%d public functions, all described in %s" % (page.functions, options.page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
