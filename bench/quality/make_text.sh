#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# make_text.sh - public prose for haystacks and continuations, as one plain-text file of a few megabytes.
#
#   bench/quality/make_text.sh [FILE]           FILE defaults to .deps/text/manuals.txt
#
# Takes the English manuals that Debian packages (free licences), drops markup and short lines, keeps paragraphs.
# The packages are unpacked into a temporary folder, never installed.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
file=${1:-$here/../../.deps/text/manuals.txt}
packages="debian-handbook debian-reference-en developers-reference debian-policy debian-faq maint-guide harden-doc"

mkdir -p "$(dirname "$file")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for package in $packages; do
    (cd "$work" && apt-get -q download "$package" >/dev/null 2>&1 && dpkg-deb -x "$package"_*.deb root &&
        rm "$package"_*.deb)
done
python3 - "$work/root" "$file" <<'PY'
import html.parser, os, re, sys

class Text(html.parser.HTMLParser):
    """Paragraphs of a page: text of p, li, dd, td and headings; scripts, styles and navigation are skipped."""
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.skip, self.buffer, self.paragraphs = 0, [], []
    def handle_starttag(self, tag, attrs):
        self.skip += tag in ("script", "style", "nav", "head", "pre")
        if tag in ("p", "li", "dd", "dt", "td", "h1", "h2", "h3", "h4", "br", "div"):
            self.flush()
    def handle_endtag(self, tag):
        self.skip -= tag in ("script", "style", "nav", "head", "pre")
        if tag in ("p", "li", "dd", "dt", "td", "h1", "h2", "h3", "h4", "div"):
            self.flush()
    def handle_data(self, data):
        if self.skip <= 0:
            self.buffer.append(data)
    def flush(self):
        text = re.sub(r"\s+", " ", "".join(self.buffer)).strip()
        self.buffer = []
        if len(text) >= 80:  # shorter ones are links, numbers, table cells
            self.paragraphs.append(text)

root, target = sys.argv[1:]
seen, out = set(), []
for folder, folders, names in sorted(os.walk(root)):
    folders.sort()
    for name in sorted(names):
        path = os.path.join(folder, name)
        if not name.endswith((".html", ".en.html")) or os.path.islink(path):
            continue
        if re.search(r"/(?!en[-_/])[a-z]{2}(-[A-Z]{2})?/", path[len(root):]) and "/en" not in path:
            continue  # translations
        if re.search(r"\.(?!en)[a-z]{2}(-[a-z]{2})?\.html$", name):
            continue
        page = Text()
        page.feed(open(path, encoding="utf-8", errors="ignore").read())
        page.flush()
        for text in page.paragraphs:
            if text not in seen and sum(c.isascii() for c in text) > 0.98 * len(text):
                seen.add(text)  # the same text also exists as one large page
                out.append(text)
with open(target, "w", encoding="utf-8") as f:
    f.write("\n".join(out) + "\n")
print(f"{target}: {os.path.getsize(target)} bytes, {len(out)} paragraphs")
PY
