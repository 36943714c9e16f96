# SPDX-License-Identifier: Apache-2.0
"""The page when something is wrong: hostile text, bad files, every error of the server, no server, an API key."""

import json

from browser import By, Checks, Keys
from serve_mock import Mock

HOSTILE = "<img src=x onerror=document.title='owned'>"
HOSTILE_ANSWER = [
    "<img src=x one",
    "rror=document.title='owned'><script>document.title='owned'</script>",
    "<a href=javascript:document.title='owned'>x</a> & &lt;b&gt; \u202emirrored",
]


class Failures(Checks):
    def test_hostile(self):
        p, mock = self.page, self.mock
        mock.add(HOSTILE + "/../../etc/passwd", "words", step=4)
        mock.add("N" * 3000, "words", step=4)
        p.driver.refresh()
        self.until(lambda: len(p.all("#list li")) >= 5, "documents are missing")
        names = [node for node in p.all("#list .name") if HOSTILE in node.text]
        self.check(len(names) == 1, "the hostile name is not shown as it is")
        names[0].click()
        mock.answers += [{"pieces": HOSTILE_ANSWER}, {"status": 400, "message": HOSTILE}]
        p.asked(HOSTILE)
        self.until(lambda: p.answers() and "tokens, the first" in p.answers()[0], "no answer")
        self.check("".join(HOSTILE_ANSWER) in p.answers()[0], f"the answer is not shown as it is: {p.answers()}")
        p.asked("again")
        self.until(lambda: len(p.answers()) == 2 and HOSTILE in p.answers()[1], "the error is not shown as it is")
        p.all(".head .small:not(#clear)")[0].click()
        p.id("delete").find_element(By.CSS_SELECTOR, "button[value=no]").click()
        self.check(not p.all("img") and len(p.all("script")) == 1 and not p.all("a:not(.skip)"), "text became markup")
        self.check(p.driver.title == "AnchorKV", f"text was run: {p.driver.title}")
        self.check(
            p.js("return document.documentElement.scrollWidth <= innerWidth"),
            "a long name makes the page wider than the window",
        )
        blocked = p.js("""const s = document.createElement("script");
            try { s.textContent = "document.title = 'owned'" } catch { return true }
            document.body.append(s); s.remove(); return document.title === "AnchorKV" """)
        self.check(blocked, "the policy lets other scripts run")
        for entry in p.gather():  # the attempt just made may be reported; nothing else
            self.check(
                "ontent Security Policy" in entry["message"]
                or "TrustedScript" in entry["message"]
                or "status of 400" in entry["message"],
                "hostile: console: " + entry["message"],
            )
        self.quiet("hostile")

    def test_errors(self):
        p, mock = self.page, self.mock
        for name, content, words in (
            ("scan.pdf", b"%PDF-1.7 ...", "scan.pdf is a PDF."),
            ("a.docx", b"PK\x03\x04...", "a.docx is an archive"),
            ("a.bin", b"ab\0cd", "a.bin is not a text"),
            ("latin.txt", b"caf\xe9", "latin.txt is not UTF-8 text"),
            ("empty.txt", b" \n", "empty.txt is empty"),
        ):
            p.upload(self.file(name, content))
            self.until(lambda w=words: w in p.text("#alerts"), f"{name}: not told in words")
        for button in p.all("#alerts button"):
            button.click()
        self.check(p.text("#alerts") == "", "messages cannot be dismissed")
        p.upload(self.file("utf16.txt", "\ufeffwide words".encode("utf-16-le")))
        self.until(
            lambda: any(d["text"] == "wide words" for d in mock.documents.values()), "UTF-16 with its mark is not read"
        )
        p.id("ratio").send_keys("0.1")
        p.upload(self.file("ratio.txt", "words"))
        self.until(lambda: "a number from 1 to 100" in p.text("#alerts"), "a wrong ratio is not told")
        p.id("ratio").clear()
        p.id("ratio").send_keys("10")
        p.upload(self.file("bad.txt", "UNREADABLE words"))
        self.until(
            lambda: "Could not be read: the document has 9000 tokens" in p.text("#list"),
            "a failed document is not told",
        )
        self.check("a number from 1" not in p.text("#alerts"), "a message stays when its reason is gone")
        self.check(not p.id("send").is_enabled(), "a failed document can be asked")
        self.quiet("errors in documents")
        for status, message, words in (
            (413, "the body is larger than 64 MiB", "larger than the server takes: the body"),
            (429, "the queue is full", "too much to do just now: the queue is full"),
        ):
            # The page may look at its documents first: the refusal is for whoever comes.
            self.until(
                lambda: all(d["step"] == 4 or d["error"] for d in mock.documents.values()), "documents are not done"
            )
            mock.refuse.append((status, message, [("Retry-After", "3")]))
            p.upload(self.file("big.txt", "words"))
            self.until(lambda w=words: w in p.text("#alerts"), f"{status}: not told in words")
            self.check(
                "big.txt was not added" in p.text("#alerts") and "Try again in 3 s." in p.text("#alerts"),
                p.text("#alerts"),
            )
            self.until(lambda: "big.txt" not in p.text("#list"), "a refused document stays in the list")
            p.all("#alerts button")[0].click()
        self.quiet("refused documents", [413, 429])
        next(n for n in p.all("#list .name") if n.text == "utf16.txt").click()
        for answer, words in (
            (
                {"status": 429, "message": "8 questions wait already", "headers": [("Retry-After", "2")]},
                "too much to do just now: 8 questions",
            ),
            (
                {"status": 400, "message": "the conversation is longer than the context"},
                "refused this: the conversation is longer",
            ),
            ({"status": 503, "message": "the server is ending"}, "cannot do this now: the server is ending"),
            ({"status": 500, "message": ""}, "The server failed (HTTP status 500)"),
            ({"pieces": ["half an "], "end": "broken"}, "The connection broke before the answer was whole."),
            ({"pieces": ["half an "], "end": "error"}, "The server broke off: the slot was lost"),
        ):
            mock.answers.append(answer)
            p.asked("What now?")
            self.until(lambda w=words: p.answers() and w in p.answers()[-1], f"not told in words: {words}")
            if "pieces" in answer:
                self.check("half an" in p.answers()[-1], "what came of a broken answer is gone")
            self.check(p.id("send").is_displayed(), "after an error nothing can be asked")
        self.quiet("errors in answers", [429, 400, 503, 500])
        count = len(p.answers())
        p.all(".log:not([hidden]) .answer button")[-1].click()
        self.until(lambda: "11 tokens" in p.answers()[-1], "asking again gives no answer")
        self.check(len(p.answers()) == count, "asking again leaves the failed answer")
        asked = json.loads([r for r in mock.requests if r[1] == "/v1/chat/completions"][-1][3])
        self.check(len(asked["messages"]) == 1, f"failed answers are part of the conversation: {asked['messages']}")
        self.quiet("asked again")

    def test_server_gone(self):
        p, mock = self.page, self.mock
        port = mock.server_address[1]
        mock.shutdown()
        mock.server_close()
        p.js("document.dispatchEvent(new Event('visibilitychange'))")
        self.until(lambda: "The server does not answer" in p.text("#alerts"), "a server that ended is not told")
        p.asked("Anybody there?")
        self.until(
            lambda: "The server does not answer" in p.answers()[-1], "a question to nobody is not answered in words"
        )
        again = Mock(port)
        again.documents, again.made = mock.documents, mock.made
        self.mock = again.start()
        self.until(lambda: p.text("#alerts") == "", "the message stays when the server is back")
        for entry in p.gather():
            self.check(
                "ERR_CONNECTION_REFUSED" in entry["message"] or "ERR_EMPTY_RESPONSE" in entry["message"],
                f"gone: {entry['message']}",
            )
        self.quiet("server gone")

    def test_key(self):
        p = self.page
        self.mock.api_key = "s3cret"
        self.open(self.mock.url)
        self.until(lambda: p.id("key").is_displayed(), "a server with a key does not lead to the field for it")
        self.check(p.focus() == "key-text", "the field for the key has not the focus")
        self.check(p.id("key-text").get_attribute("type") == "password", "the key can be read over the shoulder")
        self.shot("key")
        p.type("wr\u00f6ng", Keys.ENTER)
        self.check("letters, digits and signs" in p.text("#key"), "an impossible key is not told")
        p.type("wrong", Keys.ENTER)
        self.until(lambda: "does not accept this API key" in p.text("#key"), "a wrong key is not told")
        p.type("s3cret", Keys.ENTER)
        self.until(lambda: len(p.all("#list li")) > 0, "with the key there are no documents")
        self.check(not p.id("key").is_displayed(), "the field for the key stays")
        p.driver.refresh()
        self.until(lambda: len(p.all("#list li")) > 0, "after a reload the key is forgotten")
        self.check(
            not p.js("return localStorage.length") and p.js("return document.cookie") == "",
            "the key is kept beyond the tab",
        )
        self.check(all("s3cret" not in r[1] for r in self.mock.requests), "the key is in an address")
        self.quiet("key", [401])
        self.mock.api_key = None
