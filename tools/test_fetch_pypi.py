#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""fetch_pypi.py against a package index on this machine's loopback address that misbehaves in the usual ways."""
import hashlib
import http.server
import json
import os
import sys
import tempfile
import threading
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import fetch_pypi  # noqa: E402

CONTENT = bytes(range(256)) * 4096
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Index(http.server.BaseHTTPRequestHandler):
    drops = 0           # how many more answers break off half-way
    ranges = True       # whether Range is understood
    json_page = True
    asked = []          # (path, Range) of every file request

    def log_message(self, *_args):
        pass

    def do_GET(self):
        if self.path == "/simple/some-project/":
            files = ["some_project-1.0.tar.gz", "some_project-1.0%2Blocal.tar.gz"]
            if Index.json_page:
                kind = "application/vnd.pypi.simple.v1+json"
                body = json.dumps({"files": [{"url": "../../files/" + name} for name in files]})
            else:
                kind = "text/html"
                body = "".join('<a href="../../files/%s#sha256=00">x</a>' % name for name in files)
            self.answer(200, kind, body.encode())
        elif self.path.startswith("/files/"):
            wanted = self.headers.get("Range")
            Index.asked.append((self.path, wanted))
            start = int(wanted[len("bytes="):-1]) if wanted and Index.ranges else 0
            if start >= len(CONTENT):
                self.answer(416, "text/plain", b"")
                return
            self.answer(206 if start else 200, "application/octet-stream", CONTENT[start:])
        else:
            self.answer(404, "text/plain", b"")

    def answer(self, status, kind, body):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if Index.drops > 0 and self.path.startswith("/files/"):
            Index.drops -= 1
            body = body[:len(body) // 2]
        self.wfile.write(body)


class FetchTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        fetch_pypi.PAUSE_S = 0.0
        os.environ["no_proxy"] = "*"
        cls.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index)
        threading.Thread(target=cls.server.serve_forever, daemon=True).start()
        os.environ["PIP_INDEX_URL"] = "http://127.0.0.1:%d/simple" % cls.server.server_address[1]

    @classmethod
    def tearDownClass(cls):
        cls.server.shutdown()
        cls.server.server_close()

    def setUp(self):
        Index.drops, Index.ranges, Index.json_page, Index.asked = 0, True, True, []
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.out = os.path.join(self.folder.name, "out.tar.gz")

    def fetch(self, sha256=SHA256, project="Some_Project", name="some_project-1.0.tar.gz"):
        fetch_pypi.fetch(project, name, sha256, self.out)

    def assert_whole(self):
        with open(self.out, "rb") as stream:
            self.assertEqual(stream.read(), CONTENT)
        self.assertEqual(os.listdir(self.folder.name), ["out.tar.gz"])

    def test_json_page(self):
        self.fetch()
        self.assert_whole()

    def test_html_page_and_escaped_name(self):
        Index.json_page = False
        self.fetch(name="some_project-1.0+local.tar.gz")
        self.assert_whole()

    def test_there_already(self):
        self.fetch()
        self.fetch()
        self.assertEqual(len(Index.asked), 1)

    def test_damaged_file_is_replaced(self):
        with open(self.out, "wb") as stream:
            stream.write(b"damaged")
        self.fetch()
        self.assert_whole()

    def test_broken_connection_is_resumed(self):
        Index.drops = 2
        self.fetch()
        self.assert_whole()
        self.assertEqual([wanted for _, wanted in Index.asked],
                         [None, "bytes=%d-" % (len(CONTENT) // 2), "bytes=%d-" % (len(CONTENT) * 3 // 4)])

    def test_index_without_ranges_starts_over(self):
        Index.drops, Index.ranges = 1, False
        self.fetch()
        self.assert_whole()

    def test_leftover_of_another_file(self):
        with open(self.out + ".part", "wb") as stream:
            stream.write(b"x" * (len(CONTENT) + 5))
        self.fetch()
        self.assert_whole()

    def test_wrong_hash_is_not_kept(self):
        with self.assertRaisesRegex(fetch_pypi.FetchError, "expected 00ff"):
            self.fetch(sha256="00ff")
        self.assertEqual(os.listdir(self.folder.name), [])
        self.assertEqual(len(Index.asked), fetch_pypi.TRIES)

    def test_unknown_file_and_project(self):
        with self.assertRaisesRegex(fetch_pypi.FetchError, "lists no file other.tar.gz"):
            self.fetch(name="other.tar.gz")
        with self.assertRaisesRegex(fetch_pypi.FetchError, "404"):
            self.fetch(project="other")


if __name__ == "__main__":
    unittest.main()
