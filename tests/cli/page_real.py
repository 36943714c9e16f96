# SPDX-License-Identifier: Apache-2.0
"""The page on the real `akv serve`: a document read by a real model, an answer, a stopped answer, deleting, an API key."""

import http.client
import json
import os
import socket
import subprocess
import time

from browser import By, Checks, Keys

HOSTILE = "<img src=x onerror=document.title='owned'>.txt"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """`akv serve` on a port of its own, ended when the test is."""

    def __init__(self, akv, model, log, *options):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/"
        self.log = open(log, "wb")
        command = [akv, "serve", "-m", model, "--port", str(self.port), *options]
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, env=environment
        )
        for _ in range(600):
            try:
                if self.ask("GET", "/health")[0] == 200:
                    return
            except OSError:
                if self.process.poll() is not None:
                    break
            time.sleep(0.1)
        self.end()
        with open(log, encoding="utf-8", errors="replace") as file:
            raise RuntimeError("akv serve does not start:\n" + file.read())

    def ask(self, method, path, body=None, headers=()):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def end(self):
        """The exit code after SIGTERM."""
        self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return None
        finally:
            self.log.close()


class Real(Checks):
    def test_server(self, akv, model, text):
        server = Server(akv, model, os.path.join(self.folder, "serve.log"))
        try:
            self.headers(server)
            self.document(server, text)
            self.questions(server)
            self.rest(server)
        finally:
            code = server.end()
        self.check(code == 0, f"real: after SIGTERM the exit code is {code}")

    def headers(self, server):
        status, headers, body = server.ask("GET", "/")
        self.check(
            status == 200 and headers["Content-Type"].startswith("text/html"), f"real: / gives {status}, {headers}"
        )
        with open(os.path.join(os.path.dirname(__file__), "..", "..", "cli", "serve", "page.html"), "rb") as file:
            self.check(body == file.read(), "real: the page is not byte for byte the file")
        self.check(headers.get("X-Frame-Options") == "DENY", "real: other pages may frame this one")
        self.check(headers.get("X-Content-Type-Options") == "nosniff", "real: types may be guessed")
        # What a page from elsewhere can send without asking first: a body that is not declared JSON.
        status, headers, body = server.ask(
            "POST", "/v1/documents", '{"name":"a","text":"b"}', {"Content-Type": "text/plain"}
        )
        self.check(400 <= status < 500 and "message" in json.loads(body)["error"], f"real: text/plain gives {status}")
        status, headers, body = server.ask("OPTIONS", "/v1/documents", None, {"Origin": "http://example.org"})
        self.check("Access-Control-Allow-Origin" not in headers, "real: pages from elsewhere may ask")

    def document(self, server, text):
        p = self.page
        p.driver.get("about:blank")  # what the stand-in's page still asked for is no request of this one
        p.gather()
        p.urls.clear()
        self.open(server.url)
        self.until(lambda: "SmolLM2" in p.id("model").text, "real: the model's name is not shown")
        p.upload(self.file("licence.txt", text))
        states, seen = [], set()
        end = time.monotonic() + 120
        while time.monotonic() < end and not p.id("send").is_enabled():
            states.append(p.text("#list"))
            seen.update(word for word in ("Waiting", "Being read", "Being compressed") if word in states[-1])
            time.sleep(0.02)
        self.check(seen & {"Being read", "Being compressed"}, f"real: no progress is shown, only {seen}")
        words = p.text("#list")
        self.check("times smaller" in words and "MiB" in words, f"real: tokens and bytes are not shown: {words}")
        told = json.loads(server.ask("GET", "/v1/documents")[2])["data"][0]
        self.check(9.9 <= told["ratio"] <= 11, f"real: {told}")
        self.shot("real-ready")

    def questions(self, server):
        p = self.page
        p.all("#form summary")[0].click()
        p.id("length").clear()
        p.id("length").send_keys("24")
        p.id("question").send_keys("Who publishes this licence?", Keys.ENTER)
        self.until(lambda: p.answers() and "the first after" in p.answers()[0], "real: no answer", 120)
        self.shot("real-answer")
        p.asked("And who may change it?")
        self.until(lambda: len(p.answers()) == 2 and "the first after" in p.answers()[1], "real: no second answer", 120)
        p.id("length").clear()
        p.asked("Repeat the whole licence, word by word.")
        self.until(lambda: len(p.answers()) == 3 and len(p.answers()[2]) > 20, "real: no third answer", 60)
        p.type(Keys.ESCAPE)
        self.until(lambda: "Stopped." in p.answers()[2], "real: Escape does not stop")
        p.id("clear").click()
        p.id("length").send_keys("24")
        p.asked("In one word: is this a licence?")
        self.until(lambda: p.answers() and "the first after" in p.answers()[0], "real: no answer after a stop", 120)

    def rest(self, server):
        p = self.page
        p.upload(self.file(HOSTILE, "Some words."))
        self.until(lambda: HOSTILE in p.text("#list") and p.id("send").is_enabled(), "real: a hostile name", 60)
        self.check(not p.all("img") and p.driver.title == "AnchorKV", "real: a name became markup")
        for left in (1, 0):
            p.all("#list .head .small")[0].click()
            p.id("delete").find_element(By.CSS_SELECTOR, "button[value=yes]").click()
            self.until(lambda n=left: len(p.all("#list li")) == n, "real: not deleted")
        self.check(
            json.loads(server.ask("GET", "/v1/documents")[2])["data"] == [], "real: the server still has documents"
        )
        self.quiet("real")
