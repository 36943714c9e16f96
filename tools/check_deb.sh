#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_deb.sh - build the Debian packages, install them into a fresh Debian 12 (debootstrap), and use them there: two
# programs by pkg-config and find_package, the command without a model, and, when a model is at hand, a question.
#
#   tools/check_deb.sh [FOLDER]       as root; FOLDER keeps the chroot (600 MB), by default it is made and removed
#
# Minutes; run by hand. Needs debootstrap and lintian (Debian packages); packages come from the mirror that apt uses here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
deps=${AKV_DEPS:-$PWD/.deps}
say() { printf 'check-deb: %s\n' "$*" >&2; }
[ "$(id -u)" -eq 0 ] || { say "debootstrap needs root"; exit 1; }
command -v debootstrap >/dev/null || { say "debootstrap not found: apt-get install debootstrap"; exit 1; }

started=$SECONDS
tools/build.sh deb
rm -f build/deb/*.deb
(cd build/deb && cpack >cpack.log 2>&1) || { cat build/deb/cpack.log >&2; exit 1; }
packages=(build/deb/*.deb)
[ "${#packages[@]}" -eq 3 ] || { say "expected three packages, found: ${packages[*]}"; exit 1; }
for package in "${packages[@]}"; do
    say "$(basename "$package"): $(dpkg-deb -f "$package" Depends), $(stat -c %s "$package") bytes"
done
# Only errors count. The maintainer's address is the business of whoever builds for others (cmake/packaging.cmake).
if command -v lintian >/dev/null; then
    lintian --fail-on error --allow-root --suppress-tags bogus-mail-host,bogus-mail-host-in-debian-changelog,initial-upload-closes-no-bugs "${packages[@]}"
fi

root=${1:-$(mktemp -d)}
[ $# -gt 0 ] || trap 'rm -rf "$root"' EXIT
if [ ! -x "$root/usr/bin/dpkg" ]; then
    mirror=$(apt-get indextargets --format '$(REPO_URI) $(CODENAME)' | awk '$2 == "bookworm" { print $1; exit }')
    # What the packages ask for, and what a user of them has: a compiler, pkg-config and CMake.
    wanted=$(for package in "${packages[@]}"; do dpkg-deb -f "$package" Depends; done | tr ',' '\n' | sed 's/ *(.*//; s/^ *//' |
        grep -v '^libanchorkv' | sort -u | paste -sd, -)
    debootstrap --variant=minbase --include="$wanted,gcc,make,pkg-config,cmake" bookworm "$root" "$mirror" \
        >build/deb/debootstrap.log 2>&1 || { tail -n 20 build/deb/debootstrap.log >&2; exit 1; }
    say "fresh Debian 12 after $((SECONDS - started)) s"
fi
mkdir -p "$root/packages" "$root/examples"
cp "${packages[@]}" "$root/packages/"
cp -r examples/. "$root/examples/"
inside() { chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root OMP_WAIT_POLICY=passive bash -euc "$1"; }
inside 'dpkg -i /packages/*.deb >/packages/log 2>&1 || { cat /packages/log; exit 1; }'
inside 'cd /examples && for name in minimal engine; do
            cc -std=c11 -Wall -Wextra -Werror $name.c $(pkg-config --cflags --libs anchorkv) -lm -o /tmp/$name && /tmp/$name
        done
        cmake -S find_package -B /tmp/consumer >/dev/null && cmake --build /tmp/consumer >/dev/null
        /tmp/consumer/consumer_shared >/dev/null && /tmp/consumer/consumer_static >/dev/null
        readelf -d /tmp/engine | grep -o "libanchorkv.so[.0-9]*"'
inside 'akv version && akv plan --layers 2 --kv-heads 2 --head-dim 64 --tokens 4096 >/dev/null && test -f /usr/share/man/man1/akv.1.gz'
model=$deps/models/SmolLM2-135M-Instruct.Q4_1.gguf
if [ -f "$model" ]; then
    cp "$model" "$root/model.gguf"
    head -c 6000 LICENSE >"$root/text.txt"
    inside 'akv pack -m /model.gguf -f /text.txt --ratio 10 -o /text.akv && akv verify /text.akv &&
            akv ask -q -n 32 -m /model.gguf --from /text.akv "What is this text?"'
fi
inside 'dpkg -r anchorkv-cli libanchorkv-dev libanchorkv0 >/dev/null
        if find / -xdev -name "*anchorkv*" -not -path "/packages/*" -not -path "/var/*" -not -path "/proc/*" | grep .; then exit 1; fi'
say "packages built, installed, used and removed in $((SECONDS - started)) s"
