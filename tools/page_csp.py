#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The page of `akv serve` and its Content-Security-Policy: page_csp.py [--check] PAGE

A browser runs the page's one script and one style only if their sha256 stand in the policy. Without an option the two
hashes are written into PAGE; --check says whether they are right, and whether the page keeps what the policy stands
for: nothing loaded from elsewhere, no markup made from text.
"""

import base64
import hashlib
import re
import sys

# What turns text into markup or code, or reaches out of the page.
FORBIDDEN = [
    r"\.(inner|outer)HTML",
    r"insertAdjacentHTML",
    r"document\.write",
    r"\beval\(",
    r"new Function",
    r"\bsrc=",
    r"url\(",
    r"@import",
    r"https?://(?!www\.w3\.org/2000/svg)",
    r"\son[a-z]+=\"",
    r"\sstyle=\"",
    r"DOMParser",
    r"setHTML",
]


def with_hashes(page):
    for tag in ("script", "style"):
        bodies = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        if len(bodies) != 1:
            raise ValueError(f"{len(bodies)} elements <{tag}>, instead of one")
        digest = base64.b64encode(hashlib.sha256(bodies[0].encode()).digest()).decode()
        page, found = re.subn(f"{tag}-src 'sha256-[^']*'", f"{tag}-src 'sha256-{digest}'", page)
        if found != 1:
            raise ValueError(f"the policy has {found} hashes for {tag}-src, instead of one")
    return page


def main():
    check = sys.argv[1:2] == ["--check"]
    if len(sys.argv) != 2 + check:
        print(__doc__, file=sys.stderr)
        return 2
    path = sys.argv[-1]
    with open(path, encoding="utf-8", newline="") as file:
        page = file.read()
    try:
        right = with_hashes(page)
        for pattern in FORBIDDEN:
            for hit in re.finditer(pattern, page):
                raise ValueError(f"{hit.group(0)!r} in line {page[: hit.start()].count(chr(10)) + 1}")
        if "\r" in page or not page.isascii():
            raise ValueError("carriage returns or characters beyond ASCII, which an editor may change")
    except ValueError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    if check and right != page:
        print(
            f"{path}: the policy's hashes are not those of script and style; run tools/page_csp.py on it",
            file=sys.stderr,
        )
        return 1
    if not check and right != page:
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(right)
    print(f"{path}: policy and page agree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
