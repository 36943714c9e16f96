#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Cut the last tokens of a captured layer into a small .npz for the tests.

    tools/extract_layer.py layer12.npz tests/data/layer12_tail.npz 700

Arrays of the input (float16, stored uncompressed): K [H, S, d] before RoPE, V [H, S, d], Q [heads, 32, d] post-RoPE
queries of
the last 32 tokens. The output holds the last N tokens of K and V, Q as it is, and `first` (int32 [1]), the position of
the first
token kept. Needs no numpy.
"""
import io
import re
import struct
import sys
import zipfile


def read(archive, name):
    raw = archive.read(name + ".npy")
    (length,) = struct.unpack("<H", raw[8:10])
    head = raw[10:10 + length].decode()
    assert "'<f2'" in head and "'fortran_order': False" in head, head
    shape = tuple(int(n) for n in re.search(r"'shape': \(([^)]*)\)", head).group(1).split(",") if n.strip())
    return shape, raw[10 + length:]


def write(archive, name, descr, shape, data):
    head = "{'descr': '%s', 'fortran_order': False, 'shape': (%s,), }" % (descr, ", ".join(map(str, shape)))
    head += " " * (-(10 + len(head) + 1) % 64) + "\n"
    out = io.BytesIO()
    out.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode() + data)
    info = zipfile.ZipInfo(name + ".npy", (1980, 1, 1, 0, 0, 0))  # no time stamp: the same input gives the same file
    archive.writestr(info, out.getvalue(), zipfile.ZIP_STORED)


def main():
    source, target, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with zipfile.ZipFile(source) as inp, zipfile.ZipFile(target, "w") as out:
        for name in ("K", "V"):
            (heads, tokens, dim), data = read(inp, name)
            row = dim * 2
            kept = b"".join(data[((h + 1) * tokens - count) * row:(h + 1) * tokens * row] for h in range(heads))
            write(out, name, "<f2", (heads, count, dim), kept)
            first = tokens - count
        shape, data = read(inp, "Q")
        write(out, "Q", "<f2", shape, data)
        write(out, "first", "<i4", (1,), struct.pack("<i", first))


main()
