#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the documentation points at is there: check_docs.py [PAGE...]

    links                  a relative [text](target#heading) leads to a file of the tree and a heading of it
    paths                  src/..., docs/... and the like, where set as code, are in the tree; * and {a,b} as in a shell
    make TARGET            the Makefile has it
    akv COMMAND --option   the manual page has both
    akv_name               where set as code, is a word of the headers or sources

Without pages: every .md of the tree.
"""
import glob
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOLDERS = "src|docs|include|tools|tests|examples|hosts|cli|bench|demo|python|cmake"
BUILT = re.compile(r"\.deps|^build/|^/|\.\.\.")


def read(*path):
    with open(os.path.join(ROOT, *path), encoding="utf-8") as stream:
        return stream.read()


def slug(heading):
    """The anchor that code hosts make of a heading."""
    return re.sub(r" ", "-", re.sub(r"[^\w\- ]", "", heading.lower()))


def braces(pattern):
    match = re.search(r"\{([^{}]*)\}", pattern)
    if not match:
        return [pattern]
    return [path for word in match.group(1).split(",") for path in braces(pattern[: match.start()] + word + pattern[match.end() :])]


class Tree:
    def __init__(self):
        manual = read("docs", "akv.1").replace("\\-", "-")
        self.targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
        self.commands = set(re.findall(r"^\.B akv (\w+)", manual, re.MULTILINE))
        self.options = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", re.sub(r"\\f[BIRP]", " ", manual))) | {"--help"}
        self.words = set()
        for folder in ("include", "src", "hosts", "cli", "python", "tests", "examples"):
            for base, _, names in os.walk(os.path.join(ROOT, folder)):
                for name in names:
                    if re.search(r"\.(c|h|cu|cuh|def|py|txt|in)$", name):
                        self.words.update(re.findall(r"\bakv_\w+", read(base, name)))


def findings(page, tree):
    with open(page, encoding="utf-8") as stream:
        text = stream.read()
    folder = os.path.dirname(os.path.abspath(page))
    blocks = re.findall(r"^```.*?\n(.*?)^```|((?:^ {4}[^\n]*\n)+)", text, re.MULTILINE | re.DOTALL)
    blocks = [fenced or indented for fenced, indented in blocks]
    plain = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", plain)
    lines = spans + [line for block in blocks for line in block.split("\n")]

    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", plain)):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        full = os.path.join(folder, path) if path else os.path.abspath(page)
        if not os.path.exists(full):
            yield "link to %s, which is not there" % target
        elif anchor and anchor not in [slug(heading) for heading in re.findall(r"^#+ (.*)$", read(full), re.MULTILINE)]:
            yield "link to %s: no such heading" % target
    for line in lines:
        for path in re.findall(r"(?<![\w./-])(?:%s)/[\w./*{},-]*[\w*}/]" % FOLDERS, line):
            for one in [] if BUILT.search(path) else braces(path):
                if not glob.glob(os.path.join(ROOT, one)) and not glob.glob(os.path.join(folder, one)):
                    yield "%s is not there" % one
        for target in re.findall(r"\bmake ([a-z][a-z-]*)", line):
            if target not in tree.targets:
                yield "the Makefile has no target %s" % target
        command = re.match(r"^\s*(?:\$ )?(?:build/release/cli/)?akv ([a-z]+)\b(.*)", line)
        if command:
            if command.group(1) not in tree.commands:
                yield "akv %s is not in docs/akv.1" % command.group(1)
            for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", command.group(2).split("#")[0]):
                if option not in tree.options:
                    yield "akv %s %s is not in docs/akv.1" % (command.group(1), option)
    for span in spans:
        for name in re.findall(r"(?<![\w/.-])akv_[a-z]\w*\b(?![*/.])", span):
            if name not in tree.words and not any(word.startswith(name) for word in tree.words if name.endswith("_")):
                yield "%s is nowhere in the sources" % name


def main():
    pages = sys.argv[1:]
    if not pages:
        listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=ROOT, stdout=subprocess.PIPE,
                                encoding="utf-8", check=False).stdout.split()
        # an unpacked archive is no repository
        pages = [os.path.join(ROOT, name) for name in listed] or glob.glob(os.path.join(ROOT, "*.md")) + glob.glob(
            os.path.join(ROOT, "docs", "*.md"))
    tree = Tree()
    bad = 0
    for page in pages:
        for finding in findings(page, tree):
            print("%s: %s" % (os.path.relpath(page, ROOT), finding), file=sys.stderr)
            bad += 1
    if not pages:
        print("no page found", file=sys.stderr)
        return 1
    if not bad:
        print("%d pages: links, paths, make targets, commands and names are there" % len(pages))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
