# SPDX-License-Identifier: Apache-2.0
"""`akv chat`: a scripted conversation, its commands, what must be refused, Ctrl-C, and a session file that SIGKILL cannot break.

--kills N ends the program N times at random moments (a few by default, 200 and more by hand).
"""

import argparse
import ctypes
import json
import os
import pty
import random
import select
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from harness import Harness  # noqa: E402

FEW = ["-n", "8", "-t", "1"]


def turns_of(t, path):
    """How many turns the session file holds, from its own properties."""
    return t.run("info", path).out.count("\nturn ")


def test_conversation(t, model, folder):
    path, other = os.path.join(folder, "a.akv"), os.path.join(folder, "b.akv")
    first = t.run("chat", "-m", model, *FEW, "--session", path, stdin=b"Name a colour.\nAnd another.\n", err="2 turns saved")
    lines = [line for line in first.out.split("\n") if line]
    t.run("verify", path, out="ok")
    t.check(turns_of(t, path) == 2, "chat: two turns are not two turns in the file")
    # the same conversation in two sittings: the second answer is the same
    t.run("chat", "-m", model, *FEW, "--session", other, stdin=b"Name a colour.\n", err="1 turns saved")
    again = t.run("chat", "-m", model, *FEW, "--session", other, stdin=b"And another.\n", err="going on after 1 turns")
    t.check(len(lines) >= 2 and again.out.strip() == lines[-1].strip(), f"chat: resumed, it said {again.out!r} instead of {lines[-1]!r}")
    # undo leads back to where the second question can be asked again
    undone = t.run("chat", "-m", model, *FEW, "--session", path, stdin=b"/undo\nAnd another.\n/quit\nnever said\n", err="taken back; 1 are left")
    t.check(undone.out.strip() == lines[-1].strip(), f"chat: after /undo it said {undone.out!r} instead of {lines[-1]!r}")
    t.check(turns_of(t, path) == 2, "chat: undo and one more turn are not two turns")
    saved = os.path.join(folder, "saved.akv")
    figures = os.path.join(folder, "chat.json")
    broken = os.path.join(folder, "broken.akv")  # opens, but one byte behind its head is another
    with open(path, "rb") as file:
        damaged = bytearray(file.read())
    damaged[-100] ^= 1
    with open(broken, "wb") as file:
        file.write(damaged)
    script = (f"/save {saved}\n/undo\n/undo\n/undo\n/stats\n/load {saved}\n/nonsense\n/save\n/load /nonexistent.akv\n/load {broken}\n/help\n"
              "//one slash\n\n   \n")
    done = t.run("chat", "-m", model, *FEW, "--session", path, "--json", figures, stdin=script.encode(), err="no command /nonsense")
    for text in ("nothing to take back", "2 turns, ", "which file?", "/nonexistent.akv", broken, "/undo "):
        t.check(text in done.err, f"chat: no {text!r} in {done.err}")
    t.check(turns_of(t, path) == 3, "chat: what was loaded, and one turn more, are not three turns")
    with open(figures, encoding="utf-8") as file:
        report = json.load(file)
    t.check(report["turns"] == 3 and report["segment_bytes"] == report["bytes"]["total"] > 0, f"chat --json: {report}")
    t.run("ask", "-m", model, "--from", path, "-n", "4", "-t", "1", "Why?")  # a session is a document too


def test_document(t, model, folder):
    text, packed = os.path.join(folder, "text.txt"), os.path.join(folder, "doc.akv")
    with open(text, "w", encoding="utf-8") as file:
        file.write("\n".join(f"The keeper of Carrow is Ida Fenwick. This is line {i} of the chronicle." for i in range(40)))
    t.run("pack", "-m", model, "-f", text, "--keep", "0.3", "-o", packed, "-t", "1", "-q")
    size = json.loads(t.run("info", "--json", "-", packed).out)["compressed_bytes"]
    budget = size + 90 * 2**20
    said = t.run("chat", "-m", model, "-n", "16", "-t", "1", "--from", packed, "--budget", str(budget), "--json", os.path.join(folder, "d.json"),
                 stdin=b"Who is the keeper of Carrow?\n")
    t.check("Ida" in said.out or "Fenwick" in said.out, f"chat --from: it said {said.out!r}")
    t.run("chat", "-m", model, *FEW, "--from", packed, "--budget", "1M", stdin=b"Hello\n", code=3, err="is below")
    # another program shortens the document in the middle: it is in memory, so the second answer is what it would have been
    whole = t.run("chat", "-m", model, *FEW, "--from", packed, stdin=b"Who is the keeper?\nAnd of what?\n")
    talk = Talk(t, "-m", model, *FEW, "--from", packed)
    talk.say(b"Who is the keeper?\n")
    t.check(talk.wait_for_output(60), "chat --from: no answer")
    os.truncate(packed, 1000)
    out, err = talk.process.communicate(b"And of what?\n", timeout=60)
    t.check(talk.process.returncode == 0 and out.decode() == whole.out, f"chat, its document shortened: {talk.process.returncode}, {out!r}, {err!r}")
    raw = os.path.join(folder, "raw.akv")
    t.run("pack", "-m", model, "-f", text, "--keep", "0.3", "--raw", "-o", raw, "-t", "1", "-q")
    t.run("chat", "-m", model, "--from", raw, code=2, err="--raw")
    # what is refused only once it is opened costs the conversation nothing: neither the wrong form nor a document too big for the budget
    exact = os.path.join(folder, "exact.akv")
    t.run("pack", "-m", model, "-f", text, "--method", "exact", "-o", exact, "-t", "1", "-q")
    t.run("chat", "-m", model, *FEW, "--from", exact, "--budget", "16M", stdin=b"Hello\n", code=3, err="is below")
    talk = ["chat", "-m", model, *FEW, "--budget", "16M"]
    plain = t.run(*talk, stdin=b"Name a colour.\nAnd another.\n")
    same = t.run(*talk, stdin=f"Name a colour.\n/load {raw}\n/load {exact}\nAnd another.\n".encode(), err="the conversation is as it was")
    t.check("--raw" in same.err and "is below" in same.err and same.err.count("as it was") == 2, f"chat /load: {same.err}")
    t.check(same.out == plain.out, f"chat: after two refused /load it said {same.out!r} instead of {plain.out!r}")


def test_refusals(t, model, folder):
    path = os.path.join(folder, "a.akv")
    t.run("chat", code=1, err="which model")
    t.run("chat", "-m", model, "stray", code=1, err="stray")
    t.run("chat", "-m", model, "--from", path, "--system", "x", code=1, err="--system")
    t.run("chat", "-m", model, "--budget", "x", code=1)
    t.run("chat", "-m", model, "--session", "/nonexistent/s.akv", code=6, err="/nonexistent")
    t.run("chat", "-m", os.path.join(folder, "none.gguf"), code=6)
    with open(path, "rb") as file:
        data = bytearray(file.read())
    data[len(data) // 2] ^= 4
    broken = os.path.join(folder, "broken.akv")
    with open(broken, "wb") as file:
        file.write(data)
    t.run("chat", "-m", model, "--session", broken, stdin=b"Hello\n", code=4, err="broken.akv")
    with open(broken, "rb") as file:
        t.check(file.read() == data, "chat: a damaged session file was overwritten")
    done = t.run("chat", "-m", model, *FEW, "-q", stdin=b"\xff\xfe\nHello\n", err="not UTF-8")
    t.check(done.out.strip() != "", "chat: a bad line ended the conversation")
    if os.path.exists("/dev/full"):
        with open("/dev/full", "wb") as full:
            t.run("chat", "-m", model, *FEW, stdin=b"Hello\n", code=6, err="standard output", stdout=full)


class Talk:
    """A chat whose output is watched while it runs."""

    def __init__(self, t, *args):
        self.process = subprocess.Popen([t.akv, "chat", *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.err = b""

    def say(self, text):
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def wait_for_output(self, seconds):
        return bool(select.select([self.process.stdout], [], [], seconds)[0])

    def acknowledged(self):
        """Turns that the program said it had saved, so far."""
        while select.select([self.process.stderr], [], [], 0)[0]:
            piece = os.read(self.process.stderr.fileno(), 65536)
            if not piece:
                break
            self.err += piece
        return max([int(line.split()[1]) for line in self.err.decode().split("\n")[:-1] if line.endswith("bytes") and "turns saved" in line] or [0])


def test_signals(t, model, folder):
    path = os.path.join(folder, "signals.akv")
    talk = Talk(t, "-m", model, "-n", "4000", "-t", "1", "--session", path)
    talk.say(b"Count to one thousand in words.\n")
    t.check(talk.wait_for_output(60), "chat: no answer to interrupt")
    time.sleep(0.5)
    talk.process.send_signal(signal.SIGINT)
    deadline = time.time() + 60
    while talk.acknowledged() < 1 and time.time() < deadline:
        time.sleep(0.05)
    t.check(talk.process.poll() is None and talk.acknowledged() == 1, f"chat: Ctrl-C did more than end the answer: {talk.err!r}")
    talk.say(b"Stop.\n")
    time.sleep(1.0)
    talk.process.send_signal(signal.SIGTERM)
    talk.process.communicate(timeout=60)
    t.check(talk.process.returncode == 128 + signal.SIGTERM, f"chat: exit code {talk.process.returncode} after SIGTERM")
    t.run("verify", path, out="ok")


def once_read(path):
    """A function that waits until somebody who has only read the file closes it."""
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init()
    if watch < 0 or libc.inotify_add_watch(watch, os.fsencode(path), 0x10) < 0:  # IN_CLOSE_NOWRITE
        raise OSError(ctypes.get_errno(), "inotify")

    def wait(seconds):
        seen = bool(select.select([watch], [], [], seconds)[0])
        os.close(watch)
        return seen

    return wait


def test_interrupted_load(t, model, folder):
    """Ctrl-C while a document that was read is attached to: the conversation goes on as if there had been no /load."""
    path = os.path.join(folder, "exact.akv")  # its size keeps the program busy until the signal is there
    plain = t.run("chat", "-m", model, *FEW, stdin=b"Name a colour.\nAnd another.\n")
    wait = once_read(path)
    talk = Talk(t, "-m", model, *FEW)
    talk.say(f"Name a colour.\n/load {path}\n".encode())
    t.check(wait(60), f"chat: /load did not read {path}")
    talk.process.send_signal(signal.SIGINT)
    out, err = talk.process.communicate(b"And another.\n", timeout=60)
    t.check(talk.process.returncode == 0, f"chat, /load interrupted: {talk.process.returncode}, {err!r}")
    if b" turns, " not in err:  # otherwise the signal came too late to stop it
        t.check(b"the conversation is as it was" in err, f"chat, /load interrupted: {err!r}")
        t.check(out.decode() == plain.out, f"chat: after an interrupted /load it said {out!r} instead of {plain.out!r}")


class Terminal:
    """A chat on a pseudo-terminal: what is typed, and what is shown."""

    def __init__(self, args, locale):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(args[0], args, dict(os.environ, TERM="xterm", LC_ALL=locale))
        self.shown, self.at = b"", 0

    def read(self, seconds):
        if not select.select([self.fd], [], [], seconds)[0]:
            return True
        try:
            piece = os.read(self.fd, 65536)
        except OSError:  # the program has ended
            piece = b""
        self.shown += piece
        return piece != b""

    def expect(self, text, seconds=60):
        end = time.time() + seconds
        while text not in self.shown[self.at:]:
            if time.time() > end or not self.read(0.5):
                return False
        self.at = self.shown.index(text, self.at) + len(text)
        return True

    def type(self, keys):
        time.sleep(0.2)  # the prompt may be there before the terminal is in the editor's hands
        os.write(self.fd, keys)

    def end(self, seconds=60):
        """Ctrl-D; again when it came too early."""
        end, asked = time.time() + seconds, 0.0
        while self.read(0.5):
            if time.time() > end:
                os.kill(self.pid, signal.SIGKILL)
            elif time.time() > asked + 5:
                asked = time.time()
                self.type(b"\x04")
        os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_terminal(t, model):
    """Line editing with libedit; a build without it only reads lines."""
    for locale in ("C.UTF-8", "C"):
        chat = Terminal([os.path.abspath(t.akv), "chat", "-m", os.path.abspath(model), *FEW], locale)
        typed = [
            (b"/nonsensX\x7fe\r", b"no command /nonsense;"),      # backspace
            (b"/ab\x1b[Dx\r", b"no command /axb;"),               # left arrow
            (b"\x1b[A\r", b"no command /axb;"),                   # up arrow: the line before
            (b"bc\x01/\r", b"no command /bc;"),                   # Ctrl-A: the line's beginning
            ("/né\x7fü\r".encode(), "no command /nü;".encode()),  # a letter of two bytes goes and comes as one
            (b"/gone\x03/stays\r", b"no command /stays;"),        # Ctrl-C: the line goes, the program stays
        ]
        for keys, answer in typed:
            shown = chat.expect(b"> ")
            chat.type(keys)
            t.check(shown and chat.expect(answer), f"chat on a terminal, {locale}: {keys!r} gave {chat.shown[-200:]!r}")
        t.check(chat.expect(b"> "), "chat on a terminal: no prompt")
        chat.type(b"Hello\r")
        chat.expect(b"reading")
        begun = chat.at
        t.check(chat.expect(b"\r\n> "), "chat on a terminal: no answer")
        said = chat.shown[begun:chat.at].rsplit(b"\x1b[K", 1)[-1]  # what no later bar wiped
        t.check(b"tokens/s" not in said and len(said) > 8, f"chat on a terminal: the answer's line is {said!r}")
        t.check(chat.end() == 0, "chat on a terminal: Ctrl-D did not end it well")


def test_kills(t, model, folder, kills, seed):
    """SIGKILL at random moments: the file stays whole, and no answer that was said to be saved is lost."""
    path = os.path.join(folder, "kills.akv")
    rng = random.Random(seed)
    have, lost, grown, most, files = 0, 0, 0, 0, 0
    for i in range(kills):
        # so small a budget that old turns are compressed on the way to 60
        talk = Talk(t, "-m", model, "-n", "6", "-t", "1", "--budget", "13M", "--session", path)
        talk.say(b"".join(b"Say word %d.\n" % n for n in range(40)))
        # Every second one is ended after it has saved something, however busy the machine.
        patience = time.time() + (60 if i % 2 else 0)
        while talk.acknowledged() <= have and time.time() < patience:
            time.sleep(0.02)
        time.sleep(rng.uniform(0.0, 3.0))
        talk.process.kill()
        talk.process.wait()
        said = talk.acknowledged()
        for stream in (talk.process.stdin, talk.process.stdout, talk.process.stderr):
            try:
                stream.close()
            except BrokenPipeError:
                pass
        least = max(have, said)
        if not os.path.exists(path):
            t.check(least == 0, f"kill {i}: the session file is gone")
            continue
        files += 1
        t.run("verify", "-q", path)
        turns = turns_of(t, path)
        lost += turns < least
        t.check(turns >= least, f"kill {i}: {turns} turns are left of {least}")
        grown += turns > have
        most = max(most, turns)
        have = turns
        if turns > 60:  # start anew before the model's context is full
            os.remove(path)
            have = 0
    left = [name for name in os.listdir(folder) if name.endswith(".tmp")]
    print(f"{kills} kills: {files} times a file, {grown} times with new turns, at most {most} turns, {lost} answers lost, "
          f"{len(left)} temporary files left")
    t.check(grown > 0, "the kills came before anything was said: the test shows nothing")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--akv", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only-kills", action="store_true")
    args = parser.parse_args()
    t = Harness(args.akv)
    with tempfile.TemporaryDirectory() as folder:
        if not args.only_kills:
            test_conversation(t, args.model, folder)
            test_document(t, args.model, folder)
            test_refusals(t, args.model, folder)
            test_signals(t, args.model, folder)
            test_interrupted_load(t, args.model, folder)
            test_terminal(t, args.model)
        test_kills(t, args.model, folder, args.kills, args.seed)
    return t.end()


if __name__ == "__main__":
    sys.exit(main())
