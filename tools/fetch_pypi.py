#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fetch one named file of a Python package index, check its sha256, and only then keep it.

Why not `pip download`: for a source distribution pip runs the distribution's build backend to learn its dependencies.
Nothing of what is fetched here is run, and the package's dependencies are not wanted.

The index is pip's own: PIP_INDEX_URL, else pip's configuration, else the address built into pip. Proxy variables
(http_proxy, https_proxy, no_proxy) and certificate variables (PIP_CERT, SSL_CERT_FILE, SSL_CERT_DIR) are honoured.

    fetch_pypi.py --project NAME --file FILE --sha256 HEX --out PATH

PATH appears only when the whole file is there and its hash is right; an interrupted download stays in PATH.part and is
resumed. Exit status: 0 kept (or already there), 1 failed with a sentence on standard error, 2 wrong usage.
"""
import argparse
import base64
import hashlib
import html.parser
import json
import os
import re
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

CHUNK_BYTES = 1 << 20
TRIES = 5
PAUSE_S = 2.0  # before the second try; doubles each time
TIMEOUT_S = 120


class FetchError(Exception):
    """A failure that trying again will not cure."""


def pip_setting(name):
    """One value of pip's configuration, environment included, or None."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "get", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None if done.returncode == 0 else None


def index_url():
    if os.environ.get("PIP_INDEX_URL"):
        return os.environ["PIP_INDEX_URL"]
    try:
        from pip._internal.models.index import PyPI
    except ImportError:
        raise FetchError("%s has no pip, which knows the address of the package index: install the Debian package "
                         "python3-pip, or set PIP_INDEX_URL" % sys.executable) from None
    return pip_setting("global.index-url") or PyPI.simple_url


def make_opener():
    cert = os.environ.get("PIP_CERT")
    context = ssl.create_default_context(cafile=cert if cert and os.path.isfile(cert) else None)
    return urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))


def make_request(url, headers):
    """A request whose user:password in the address, if any, becomes a header."""
    parts = urllib.parse.urlsplit(url)
    if parts.username is not None:
        secret = urllib.parse.unquote(parts.username) + ":" + urllib.parse.unquote(parts.password or "")
        headers = dict(headers, Authorization="Basic " + base64.b64encode(secret.encode()).decode())
        parts = parts._replace(netloc=parts.netloc.rpartition("@")[2])
    return urllib.request.Request(urllib.parse.urlunsplit(parts), headers=headers)


class Links(html.parser.HTMLParser):
    """The href of every anchor of a simple page."""

    def __init__(self):
        super().__init__()
        self.hrefs = []

    def handle_starttag(self, tag, attrs):
        if tag == "a":
            self.hrefs += [value for name, value in attrs if name == "href" and value]


def find_file(opener, index, project, filename):
    """The address of filename on the index's page of the project."""
    name = re.sub(r"[-_.]+", "-", project).lower()
    page = index.rstrip("/") + "/" + name + "/"
    accept = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
    with opener.open(make_request(page, {"Accept": accept}), timeout=TIMEOUT_S) as answer:
        kind = answer.headers.get("Content-Type", "")
        base = answer.geturl()
        body = answer.read().decode("utf-8")
    if "json" in kind:
        urls = [entry["url"] for entry in json.loads(body)["files"]]
    else:
        links = Links()
        links.feed(body)
        urls = links.hrefs
    for url in urls:
        full = urllib.parse.urljoin(base, url)
        path = urllib.parse.urlsplit(full).path
        if urllib.parse.unquote(path.rpartition("/")[2]) == filename:
            return full
    raise FetchError("the package index lists no file %s for %s" % (filename, project))


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for chunk in iter(lambda: stream.read(CHUNK_BYTES), b""):
            digest.update(chunk)
    return digest.hexdigest()


def download(opener, url, part):
    """Append what is missing of url to the file `part`."""
    have = os.path.getsize(part) if os.path.exists(part) else 0
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = "bytes=%d-" % have
    try:
        answer = opener.open(make_request(url, headers), timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing beyond what we have: the hash decides whether it is the right thing
            return
        raise
    with answer:
        resumed = have and answer.status == 206
        expected = answer.headers.get("Content-Length")
        with open(part, "ab" if resumed else "wb") as stream:
            received = 0
            for chunk in iter(lambda: answer.read(CHUNK_BYTES), b""):
                stream.write(chunk)
                received += len(chunk)
    if expected is not None and received != int(expected):
        raise OSError("the connection ended after %d of %s bytes" % (received, expected))


def fetch(project, filename, sha256, out):
    if os.path.exists(out):
        if sha256_of(out) == sha256:
            return
        os.remove(out)
    part = out + ".part"
    opener = make_opener()
    index = index_url()
    for attempt in range(1, TRIES + 1):
        try:
            url = find_file(opener, index, project, filename)
            download(opener, url, part)
            found = sha256_of(part)
            if found == sha256:
                os.replace(part, out)
                return
            os.remove(part)
            raise OSError("sha256 is %s, expected %s; the download was thrown away" % (found, sha256))
        except (OSError, urllib.error.URLError, json.JSONDecodeError) as error:
            final = isinstance(error, urllib.error.HTTPError) and error.code in (401, 403, 404, 410)
            if isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError):
                raise FetchError("%s: %s; behind a proxy with its own authority set SSL_CERT_FILE to the file with its "
                                 "certificate" % (filename, error.reason)) from None
            if final or attempt == TRIES:
                raise FetchError("%s: %s" % (filename, error)) from None
            print("fetch_pypi: try %d of %d: %s" % (attempt, TRIES, error), file=sys.stderr)
            time.sleep(PAUSE_S * 2 ** (attempt - 1))


def main():
    parser = argparse.ArgumentParser(description="Fetch one file of a Python package index and check its sha256.")
    parser.add_argument("--project", required=True)
    parser.add_argument("--file", required=True)
    parser.add_argument("--sha256", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    try:
        fetch(args.project, args.file, args.sha256.lower(), args.out)
    except FetchError as error:
        print("fetch_pypi: %s" % error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
