#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A stand-in for `akv serve` without a model: the same interface, and on demand every way in which it can go wrong.

The test of the page imports it and holds the reins: a document takes one step towards "ready" at every look at it,
unless `hold` is set; what a question is answered with stands in `answers`.
By hand: serve_mock.py [--port 8080] [--api-key KEY] [--pace SECONDS]
"""

import argparse
import http.server
import json
import os
import threading
import time
import urllib.parse

PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "cli", "serve", "page.html")
BYTES_PER_TOKEN = 22528  # of SmolLM2-135M, dense
STEPS = [("queued", 0.0), ("reading", 0.25), ("reading", 0.6), ("compressing", 0.9), ("ready", 1.0)]


def words(text):
    return [word + " " for word in text.split()]


class Mock(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port=0, api_key=None, pace=0.0):
        super().__init__(("127.0.0.1", port), Handler)
        self.api_key = api_key
        self.pace = pace  # seconds between two pieces of an answer
        self.hold = False  # documents stay where they are
        self.documents = {}
        self.made = 0
        # for the next questions: dicts of pieces and end (whole, length, broken, error, hang), or of status and message
        self.answers = []
        self.refuse = []  # (status, message, headers) for the next uploads
        self.requests = []  # (method, path, headers, body), everything that came
        self.broken_pipes = 0  # answers that the other side did not want to the end
        self.lock = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def start(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def handle_error(self, request, client_address):
        pass  # a browser that goes away is no news

    def add(self, name, text, ratio=None, step=0):
        self.made += 1
        tokens = max(1, len(text) // 4)
        doc = {
            "id": f"doc-{self.made:08x}",
            "object": "document",
            "name": name,
            "created": int(time.time()),
            "error": None,
            "want": ratio or 10,
            "count": tokens,
            "step": step,
            "text": text,
        }
        self.documents[doc["id"]] = doc
        return doc

    def told(self, doc):
        """The document as the interface shows it."""
        status, progress = STEPS[doc["step"]]
        if doc["error"]:
            status = "failed"
        known, final = doc["step"] > 0, status == "ready"
        read = int(doc["count"] * min(1.0, progress / 0.9))
        dense = read * BYTES_PER_TOKEN
        size = int(dense / doc["want"] if doc["count"] > 40 else dense + 25000) if final else 0
        return {
            "id": doc["id"],
            "object": "document",
            "name": doc["name"],
            "status": status,
            "created": doc["created"],
            "tokens": doc["count"] if known else None,
            "tokens_read": read,
            "progress": progress,
            "dense_bytes": dense,
            "bytes": size,
            "ratio": dense / size if size else None,
            "error": doc["error"],
        }

    def step(self, doc):
        if self.hold or doc["error"] or doc["step"] + 1 >= len(STEPS):
            return
        doc["step"] += 1
        if "UNREADABLE" in doc["text"] and doc["step"] == 2:
            doc["error"] = "the document has 9000 tokens, and the model's context ends at 8192"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, status, value, headers=(), kind="application/json"):
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in (("Content-Type", kind), ("Content-Length", str(len(data))), *headers):
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)

    def error(self, status, message, headers=()):
        self.reply(
            status,
            {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}},
            headers,
        )

    def handle_any(self):
        mock = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urllib.parse.urlsplit(self.path).path
        with mock.lock:
            mock.requests.append((self.command, self.path, dict(self.headers), body))
        if path == "/":
            with open(PAGE, "rb") as file:
                return self.reply(200, file.read(), kind="text/html; charset=utf-8")
        if path == "/health":
            return self.reply(200, {"status": "ok"})
        if not path.startswith("/v1/"):
            return self.error(404, "no such path")
        what = (self.command, path.split("/")[2])
        with mock.lock:
            refusal = mock.refuse.pop(0) if mock.refuse and what == ("POST", "documents") else None
        if refusal:
            return self.error(*refusal)
        if mock.api_key and self.headers.get("Authorization") != "Bearer " + mock.api_key:
            return self.error(401, "missing or wrong API key")
        if what == ("GET", "models"):
            return self.reply(200, {"object": "list", "data": [{"id": "mock-135m", "object": "model"}]})
        if what == ("POST", "documents"):
            asked = json.loads(body)
            with mock.lock:
                return self.reply(202, mock.told(mock.add(asked["name"], asked["text"], asked.get("ratio"))))
        if what == ("GET", "documents"):
            with mock.lock:
                for doc in mock.documents.values():
                    mock.step(doc)
                return self.reply(
                    200, {"object": "list", "data": [mock.told(doc) for doc in reversed(mock.documents.values())]}
                )
        if what == ("DELETE", "documents"):
            with mock.lock:
                doc = mock.documents.pop(path.split("/")[-1], None)
            return (
                self.reply(200, {"id": doc["id"], "object": "document", "deleted": True})
                if doc
                else self.error(404, "no such document")
            )
        if what == ("POST", "chat"):
            return self.chat(json.loads(body))
        return self.error(404, "no such path")

    do_GET = do_POST = do_DELETE = handle_any

    def chat(self, asked):
        mock = self.server
        doc = mock.documents.get(asked.get("document"))
        if doc is None:
            return self.error(404, "no such document")
        if mock.told(doc)["status"] != "ready":
            return self.error(409, "the document is not ready")
        with mock.lock:
            answer = mock.answers.pop(0) if mock.answers else {}
        if answer.get("status"):
            return self.error(answer["status"], answer["message"], answer.get("headers", ()))
        pieces = answer.get("pieces") or words("The keeper of the light is Ida Fenwick, the text says.")
        end = answer.get("end", "whole")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            self.chunk(delta={"role": "assistant"})
            for piece in pieces:
                time.sleep(mock.pace)
                self.chunk(delta={"content": piece})
            while end == "hang":
                time.sleep(0.05)
                self.event(": still here")
            if end == "error":
                self.event("data: " + json.dumps({"error": {"message": "the slot was lost", "type": "server_error"}}))
            if end in ("whole", "length"):
                self.chunk(delta={}, finish_reason="stop" if end == "whole" else "length")
                usage = {"prompt_tokens": 20, "completion_tokens": len(pieces), "total_tokens": 20 + len(pieces)}
                self.event("data: " + json.dumps({"choices": [], "usage": usage}))
                self.event("data: [DONE]")
        except OSError:
            mock.broken_pipes += 1
        return None

    def chunk(self, **choice):
        self.event(
            "data: "
            + json.dumps(
                {"object": "chat.completion.chunk", "choices": [{"index": 0, "finish_reason": None, **choice}]}
            )
        )

    def event(self, text):
        self.wfile.write((text + "\r\n\r\n").encode())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--api-key")
    parser.add_argument("--pace", type=float, default=0.05)
    args = parser.parse_args()
    mock = Mock(args.port, args.api_key, args.pace)
    print("mock of akv serve on " + mock.url, flush=True)
    mock.serve_forever()


if __name__ == "__main__":
    main()
