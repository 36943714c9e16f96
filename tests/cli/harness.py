# SPDX-License-Identifier: Apache-2.0
"""What the two command-line tests share: run akv, compare exit code and texts, count failures."""

import subprocess
import sys


class Harness:
    def __init__(self, akv):
        self.akv = akv
        self.checks = 0
        self.failures = 0

    def check(self, condition, text):
        self.checks += 1
        if not condition:
            self.failures += 1
            print("FAILED: " + text, file=sys.stderr)

    def run(self, *args, code=0, err="", out="", stdin=b"", stdout=None):
        """Runs akv; `err` and `out` must occur in what it prints. Returns the completed process with text output."""
        done = subprocess.run([self.akv, *args], input=stdin, stdout=stdout or subprocess.PIPE, stderr=subprocess.PIPE, check=False)
        done.out = (done.stdout or b"").decode("utf-8", "replace")
        done.err = done.stderr.decode("utf-8", "replace")
        what = "akv " + " ".join(args)
        if done.returncode != code:
            print(done.err, file=sys.stderr)
        self.check(done.returncode == code, f"{what}: exit code {done.returncode} instead of {code}")
        self.check(err in done.err, f"{what}: no {err!r} in standard error:\n{done.err}")
        self.check(out in done.out, f"{what}: no {out!r} in standard output:\n{done.out}")
        return done

    def end(self):
        if self.failures:
            print(f"{self.failures} of {self.checks} checks failed", file=sys.stderr)
        else:
            print(f"{self.checks} checks passed")
        return 1 if self.failures else 0
