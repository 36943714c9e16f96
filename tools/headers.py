# SPDX-License-Identifier: Apache-2.0
"""The public headers, read for what tools/api.py and tools/abi.py need: declarations in order, with their comments.

Understands the style of include/anchorkv and no more: /* comments */ above a declaration or at the end of its line, one
declarator a field, one value a line or several in an enum of one line. What it does not understand is an error.
"""
import re


class Item:
    """One declaration: kind is section, function, struct, enum, callback, opaque or constant."""

    def __init__(self, kind, name, text, comment, line):
        self.kind, self.name, self.text, self.comment, self.line = kind, name, text, comment, line
        self.line_end = 0  # of the declaration
        self.note = None   # the comment behind it, which is its own; the one above may be that of several
        self.members = []  # (name, declaration, comment) of structs; (name, value or None, comment) of enums

    def __repr__(self):
        return "%s %s" % (self.kind, self.name)


class HeaderError(Exception):
    pass


def clean(comment):
    """The text of a comment without its stars; indentation inside is kept."""
    lines = comment.strip()[2:-2].strip("\n").split("\n")
    lines = [re.sub(r"^\s*\*(?: |$)", "", line).rstrip() for line in lines]
    lines[0] = lines[0].strip() if comment[2:3] != "\n" else lines[0]
    while lines and not lines[0]:
        lines.pop(0)
    while lines and not lines[-1]:
        lines.pop()
    return "\n".join(lines)


ARRAY = re.compile(r"^.*?(\w+)\s*(?:\[[^\]]*\]\s*)*$", re.DOTALL)
POINTER = re.compile(r"^[^(]*\(\s*\*\s*(\w+)\s*\)\s*\(.*\)$", re.DOTALL)


def field_name(declaration):
    match = POINTER.match(declaration) or ("(" not in declaration and "," not in declaration and ARRAY.match(declaration))
    if not match:
        raise HeaderError("not understood as a field: %s" % declaration)
    return match.group(1)


def members_of(body, enum):
    """
    Members of a struct or enum body as (name, declaration or value, comment). A comment behind a member on its line is
    that member's; one on lines of its own is that of the members below it, up to a blank line or the next such comment.
    """
    found = []
    above, text, on_line, position, depth = None, "", False, 0, 0
    while position <= len(body):
        letter = body[position : position + 1]
        if body.startswith("/*", position):
            end = body.index("*/", position) + 2
            if on_line and not text.strip():
                found[-1][2] = clean(body[position:end])
            else:
                above = clean(body[position:end])
            position = end
            continue
        position += 1
        if letter == "\n":
            if not on_line and not text.strip() and found and body[:position].endswith("\n\n"):
                above = None
            on_line = on_line and bool(text.strip())
        depth += (letter == "(") - (letter == ")")
        if letter in (";", ",", "") and depth == 0 and (letter == ";" or enum):
            declaration = re.sub(r"\s+", " ", text).strip()
            text = ""
            if declaration and enum:
                name, _, value = declaration.partition("=")
                found.append([name.strip(), value.strip() or None, above])
            elif declaration:
                found.append([field_name(declaration), declaration, above])
            on_line = bool(declaration)
        else:
            text += letter
    if text.strip():
        raise HeaderError("not understood in a body: %s" % text.strip())
    return [tuple(member) for member in found]


def parse(path):
    """The items of a header and its opening comment."""
    with open(path, encoding="utf-8") as stream:
        source = stream.read()
    opening = ""
    items = []
    comment = None      # the one that stands above, and no blank line since
    position = 0
    seen_guard = False
    while position < len(source):
        match = re.compile(r"\s*").match(source, position)
        if match.group().count("\n") > 1:
            comment = None
        position = match.end()
        if position >= len(source):
            break
        line = source.count("\n", 0, position) + 1
        if source.startswith("/*", position):
            end = source.index("*/", position) + 2
            text = source[position:end]
            ruled = re.match(r"/\* -{10,} (.*?) \*/$", text)
            if ruled:
                items.append(Item("section", ruled.group(1), "", None, line))
            elif not seen_guard and "SPDX" not in text:
                opening = clean(text)
            elif items and items[-1].line_end == line: # behind a declaration: of it alone
                items[-1].note = clean(text)
            else:
                comment = clean(text)
            position = end
            continue
        if source[position] == "#":
            seen_guard = True
            end = source.find("\n", position)
            text = source[position:end]
            value = re.match(r"#define (AKV_\w+) (\d\w*)\s*(/\*.*\*/)?", text)
            if value:
                item = Item("constant", value.group(1), value.group(2), comment, line)
                item.note = clean(value.group(3)) if value.group(3) else None
                item.line_end = line
                items.append(item)
            elif text.startswith("#ifdef __cplusplus"):
                end = source.index("#endif", position) + 6
            position = end
            continue
        # a declaration: up to the semicolon outside braces
        depth, end = 0, position
        while True:
            if source.startswith("/*", end):
                end = source.index("*/", end) + 2
                continue
            letter = source[end]
            depth += (letter == "{") - (letter == "}")
            end += 1
            if letter == ";" and depth == 0:
                break
        text = source[position:end]
        item = declaration(text, comment, line, path)
        if item:
            item.line_end = source.count("\n", 0, end) + 1
            items.append(item)
        position = end
    return opening, items


def declaration(text, comment, line, path):
    plain = re.sub(r"\s+", " ", re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)).strip()
    match = re.match(r"AKV_API (.*?[ *])(akv_\w+)\((.*)\);$", plain)
    if match:
        return Item("function", match.group(2), plain[len("AKV_API "):], comment, line)
    match = re.match(r"typedef (struct|enum) (akv_\w+) \{(.*)\} (akv_\w+);$", text, re.DOTALL)
    if match and match.group(2) == match.group(4):
        item = Item(match.group(1), match.group(2), plain, comment, line)
        item.members = members_of(match.group(3), match.group(1) == "enum")
        return item
    match = re.match(r"typedef struct (\w+) \*?(akv_\w+);$", plain)
    if match:
        return Item("opaque", match.group(2), plain, comment, line)
    match = re.match(r"typedef .*\(\*(akv_\w+)\)\(.*\);$", plain)
    if match:
        return Item("callback", match.group(1), plain, comment, line)
    if re.match(r"struct akv_\w+;$", plain):
        return None
    raise HeaderError("%s:%d: not understood: %s" % (path, line, plain))
