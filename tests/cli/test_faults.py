# SPDX-License-Identifier: Apache-2.0
"""Files when the operating system refuses: every call of a flow fails in turn (faulty_io.c), writes are short, interrupted, the disk
fills up at some byte. Whatever happens: the file that was there before is as it was or wholly the new one, a failure has an exit code
and a sentence with the system's reason, and no temporary file is left.

Without --model only `akv repack`, `info`, `verify`. --all: every call of `pack` and `chat` too, instead of a few of each kind.
"""

import argparse
import errno
import os
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from harness import Harness  # noqa: E402

# What a flow may survive: the mode of a new file, and the folder's own sync behind the rename.
FAILING = {
    "open": [errno.EACCES, errno.EMFILE], "mkstemps": [errno.ENOSPC, errno.EROFS], "fstat": [errno.EIO], "mmap": [errno.ENOMEM],
    "read": [errno.EIO], "write": [errno.ENOSPC, errno.EIO, errno.EDQUOT], "fsync": [errno.EIO, errno.ENOSPC],
    "rename": [errno.EACCES, errno.ENOSPC], "fchmod": [errno.EPERM], "close": [errno.EIO],
}


class Flow:
    """A command that writes `target`, run in a fresh copy of `start` each time."""

    def __init__(self, t, shim, start, command, target, stdin=b"", every=True):
        self.t, self.shim, self.start, self.command, self.target, self.stdin, self.every = t, shim, start, command, target, stdin, every
        self.injected = self.survived = 0
        self.old = self.content(start)
        done, self.new, _, self.counts = self.run({})
        t.check(done.returncode == 0, f"{self.name()}: fails by itself: {done.stderr.decode()}")
        t.check(self.new != self.old, f"{self.name()}: changes nothing")

    def name(self):
        return "akv " + self.command[0]

    def content(self, folder):
        try:
            with open(os.path.join(folder, self.target), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def run(self, settings):
        # always the same path: documents and reports name their sources
        work = self.start + ".run"
        os.mkdir(work)
        try:
            folder = os.path.join(work, "files")
            shutil.copytree(self.start, folder)
            counts = os.path.join(work, "counts")
            env = dict(os.environ, LD_PRELOAD=self.shim, AKV_FAULT_FOLDER=folder, AKV_FAULT_COUNTS=counts, **settings)
            command = [a.replace("FOLDER", folder) for a in self.command]
            done = subprocess.run([self.t.akv, *command], input=self.stdin, env=env, capture_output=True, timeout=120, check=False)
            numbers = {}
            if os.path.exists(counts):
                with open(counts, encoding="ascii") as file:
                    numbers = {line.split()[0]: int(line.split()[1]) for line in file}
            left = sorted(set(os.listdir(folder)) - set(os.listdir(self.start)) - {self.target})
            return done, self.content(folder), left, numbers
        finally:
            shutil.rmtree(work)

    def inject(self, what, settings, reasons=(), must_work=False):
        done, now, left, _ = self.run(settings)
        self.injected += 1
        what = f"{self.name()}, {what}"
        err = done.stderr.decode("utf-8", "replace")
        self.t.check(not left, f"{what}: left behind: {left}")
        self.t.check(now in (self.old, self.new), f"{what}: the file is neither the old nor the new one")
        self.t.check(done.returncode >= 0, f"{what}: ended by signal {-done.returncode}")
        if done.returncode == 0:
            self.t.check(now == self.new, f"{what}: it says that all went well, but the file is not the new one\n{err}")
            self.survived += 1
        else:
            self.t.check(not must_work, f"{what}: it fails: {err}")
            if reasons:
                self.t.check(any(r in err for r in reasons), f"{what}: no reason given: {err!r}")
        return done.returncode

    def calls(self, name):
        n = self.counts.get(name, 0)
        if self.every or n <= 4:
            return range(1, n + 1)
        return sorted({1, 2, n // 2, n - 1, n})

    def run_all(self):
        for name, errors in FAILING.items():
            for at in self.calls(name):
                for error in errors:
                    base = {"AKV_FAULT_CALL": name, "AKV_FAULT_AT": str(at)}
                    self.inject(f"{name} {at} gives {errno.errorcode[error]}", {**base, "AKV_FAULT_HOW": str(error)},
                                () if name in ("fstat", "close", "fsync") else (os.strerror(error), "memory"), name == "fchmod")
                if name in ("read", "write", "fsync"):
                    self.inject(f"{name} {at} interrupted", {**base, "AKV_FAULT_HOW": "eintr"}, must_work=True)
            if name in ("read", "write") and self.counts.get(name, 0):
                self.inject(f"every {name} short", {"AKV_FAULT_CALL": name, "AKV_FAULT_AT": "1", "AKV_FAULT_HOW": "short"}, must_work=True)
        size = len(self.new)
        for room in sorted({0, 1, 127, 128, 129, size // 3, size // 2, size - 64, size - 1}):
            code = self.inject(f"a disk of {room} bytes", {"AKV_FAULT_BYTES": str(room)}, (os.strerror(errno.ENOSPC),))
            self.t.check(code != 0, f"{self.name()}: {size} bytes were written to a disk of {room}")
        self.inject("a disk that just suffices", {"AKV_FAULT_BYTES": str(10 * size)}, must_work=True)
        calls = ", ".join(f"{n} {k}" for k, n in self.counts.items() if n)
        print(f"{self.name()} {self.target}: {calls}; {self.injected} faults injected, {self.survived} without effect")


def test_shortened(t, shim, work, made, model):
    """Another program halves a file while it is read, or between reading and using it: a sentence, or no difference at all."""
    runs = 0
    commands = [["info"], ["verify"], ["repack", "--keep", "0.9", "-o", "/dev/null"]]

    def run(command, path, content, call, **wanted):
        with open(path, "wb") as file:
            file.write(content)
        env = dict(os.environ, LD_PRELOAD=shim, AKV_FAULT_FOLDER=path, AKV_FAULT_CALL=call, AKV_FAULT_AT="1" if call else "0", AKV_FAULT_HOW="cut")
        done = subprocess.run([t.akv, *command], input=b"Name a colour.\n", env=env, capture_output=True, timeout=120, check=False)
        err = done.stderr.decode("utf-8", "replace")
        for name, value in wanted.items():
            t.check(done.returncode == value if name == "code" else value in err, f"{command}, cut before {call}: {done.returncode}, {err!r}")
        t.check((os.path.getsize(path) < len(content)) == bool(call), f"{command}: nothing was cut before {call}")
        return done.stdout

    path = os.path.join(work, "shortened.akv")
    for command in commands:
        run([*command, path], path, made, "read", code=6, err="became shorter")
        t.check(run([*command, path], path, made, "close", code=0) == run([*command, path], path, made, "", code=0), f"{command}: another result")
        runs += 2
    if model:  # libllama's own file: nothing can go on, but it is said
        with open(model, "rb") as file:
            weights = file.read()
        copy = os.path.join(work, "model.gguf")
        with open(copy, "wb") as file:
            file.write(weights)
        chat = subprocess.Popen([t.akv, "chat", "-m", copy, "-n", "4", "-t", "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        chat.stdin.write(b"Name a colour.\n")
        chat.stdin.flush()
        chat.stdout.readline()
        os.truncate(copy, len(weights) // 2)
        _, err = chat.communicate(b"And another.\n", timeout=120)
        t.check(chat.returncode == 6 and b"mapped into memory" in err, f"a model that became shorter: {chat.returncode}, {err!r}")
        runs += 1
    print(f"{runs} files cut while they were in use")


def folder_with(work, name, **files):
    folder = os.path.join(work, name)
    os.mkdir(folder)
    for file, content in files.items():
        with open(os.path.join(folder, file.replace("_", ".")), "wb") as out:
            out.write(content)
    return folder


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--akv", required=True)
    parser.add_argument("--shim", required=True)
    parser.add_argument("--make-document", required=True)
    parser.add_argument("--model")
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    t = Harness(args.akv)
    injected = survived = 0
    with tempfile.TemporaryDirectory() as work:
        document = os.path.join(work, "made.akv")
        subprocess.run([args.make_document, document], check=True)
        with open(document, "rb") as file:
            made = file.read()
        old = b"what was there before"
        repack = ["repack", "FOLDER/in.akv", "--keep", "0.9", "-q", "-o"]
        flows = [
            Flow(t, args.shim, folder_with(work, "over", in_akv=made, out_akv=old), [*repack, "FOLDER/out.akv"], "out.akv"),
            Flow(t, args.shim, folder_with(work, "new", in_akv=made), [*repack, "FOLDER/out.akv"], "out.akv"),
            Flow(t, args.shim, folder_with(work, "itself", in_akv=made), [*repack, "FOLDER/in.akv"], "in.akv"),
            Flow(t, args.shim, folder_with(work, "report", in_akv=made), ["info", "FOLDER/in.akv", "--json", "FOLDER/info.json"], "info.json"),
        ]
        if args.model:
            text = "\n".join(f"Line {i} of the chronicle of Carrow." for i in range(12)).encode()
            pack = ["pack", "-m", args.model, "-f", "FOLDER/text.txt", "--keep", "0.9", "-t", "2", "-q", "-o", "FOLDER/doc.akv"]
            flows.append(Flow(t, args.shim, folder_with(work, "pack", text_txt=text, doc_akv=old), pack, "doc.akv", every=args.all))
            chat = ["chat", "-m", args.model, "-n", "2", "-t", "2", "--session", "FOLDER/talk.akv"]
            start = folder_with(work, "chat")
            subprocess.run([args.akv, *[a.replace("FOLDER", start) for a in chat]], input=b"Name a colour.\n", check=True, capture_output=True)
            flows.append(Flow(t, args.shim, start, chat, "talk.akv", stdin=b"And another.\n", every=args.all))
        test_shortened(t, args.shim, work, made, args.model)
        for flow in flows:
            flow.run_all()
            injected += flow.injected
            survived += flow.survived
    print(f"{injected} faults injected, {survived} of them without effect on the result")
    return t.end()


if __name__ == "__main__":
    sys.exit(main())
