#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The page of `akv serve` in headless Chromium, used as a person would: test_page.py [--require] [--shots DIR]

Against the stand-in of serve_mock.py, which can be made to fail in every way; with --akv, --model and --text against the
real server too. Without Chromium, its driver or Selenium the test is skipped (exit code 77); with --require it fails
then. --shots keeps pictures.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from browser import By, Keys, Page, webdriver  # noqa: E402
from page_failures import Failures  # noqa: E402
from page_real import Real  # noqa: E402
from serve_mock import Mock, words  # noqa: E402

FRESH = "The keeper of the light is Ida Fenwick. " * 400


class Test(Failures, Real):
    def test_documents(self):
        p, mock = self.page, self.mock
        self.open(mock.url)
        self.until(lambda: p.id("model").text == "mock-135m", "the model's name is not shown")
        self.check("No documents yet" in p.text("#documents"), "an empty list does not say what to do")
        self.check(not p.id("send").is_enabled(), "a question can be sent without a document")
        mock.hold = True
        p.upload(self.file("light.txt", FRESH))
        self.until(lambda: "Waiting for its turn" in p.text("#list"), "a queued document is not shown")
        seen = []
        for step in range(1, 4):
            mock.documents["doc-00000001"]["step"] = step
            self.until(
                lambda s=step: p.all("#list progress")[0].get_attribute("value") == str([0, 0.25, 0.6, 0.9][s]),
                "no progress",
            )
            seen.append(p.text("#list"))
        self.check("Being read: 1,111 of 4,000 tokens" in seen[0], f"tokens read are not shown: {seen[0]}")
        self.check("23.9 MiB" in seen[0], f"dense bytes are not shown while reading: {seen[0]}")
        self.check("Being compressed" in seen[2], f"compressing is not shown: {seen[2]}")
        self.check(not p.id("send").is_enabled(), "a question can be sent to a document that is not ready")
        self.shot("reading")
        mock.hold = False
        self.until(lambda: "4,000 tokens, 10.0 times smaller" in p.text("#list"), "the finished document is not shown")
        text = p.text("#list")
        self.check("85.9 MiB" in text and "8.59 MiB" in text, f"bytes before and after are not shown: {text}")
        widths = p.js("return [...document.querySelectorAll('#list i')].map(n => n.getBoundingClientRect().width)")
        self.check(abs(widths[1] / widths[0] - 0.1) < 0.02, f"the bars are not in proportion: {widths}")
        self.check(
            "light.txt is ready" in p.js("return document.getElementById('status').textContent"),
            "nothing tells a screen reader",
        )
        self.check(not p.all("#list progress")[0].is_displayed(), "the bar stays when all is done")
        # pasted text, with a ratio of one's own
        p.all("#paste-box summary")[0].click()
        p.id("paste-name").send_keys("A note")
        p.id("paste-text").send_keys("Pasted words. " * 20)
        p.id("ratio").send_keys("20")
        p.all("#paste button")[0].click()
        self.until(
            lambda: "20.0 times smaller" in p.text("#list"), "the pasted text is not there, or not with its ratio"
        )
        self.check(p.text("#list .open .name") == "A note", "the new document is not the one that is asked")
        self.check(p.id("paste-text").get_property("value") == "", "the pasted text is still in its field")
        p.id("ratio").clear()
        sent = [json.loads(r[3]) for r in mock.requests if r[:2] == ("POST", "/v1/documents")]
        self.check(sent[0] == {"name": "light.txt", "text": FRESH}, "the file was not sent as it is")
        self.check(
            sent[1] == {"name": "A note", "text": "Pasted words. " * 20, "ratio": 20}, f"sent for a pasted text: {sent[1]}"
        )
        # a reload finds them again
        p.driver.refresh()
        self.until(lambda: len(p.all("#list li")) == 2, "after a reload the documents are gone")
        self.quiet("documents")

    def test_drop_and_paste(self):
        p = self.page
        drop = """const data = new DataTransfer(); data.items.add(new File(["A dropped text."], "dropped.txt"));
                  const event = new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true});
                  document.body.dispatchEvent(event); return event.defaultPrevented"""
        self.check(p.js(drop), "the browser would open the dropped file in place of the page")
        self.until(lambda: "dropped.txt" in p.text("#list"), "a dropped file is not added")
        p.js("""const data = new DataTransfer(); data.setData("text/plain", "words from elsewhere");
                document.body.dispatchEvent(new ClipboardEvent("paste", {clipboardData: data, bubbles: true}))""")
        self.until(
            lambda: p.id("paste-text").get_property("value") == "words from elsewhere",
            "pasting outside of a field is lost",
        )
        self.check(p.focus() == "paste-text", "the pasted text's field has not the focus")
        p.id("paste-text").clear()
        p.all("#paste-box summary")[0].click()
        self.quiet("drop and paste")

    def test_answers(self):
        p, mock = self.page, self.mock
        p.all("#list .name")[0].click()
        self.until(lambda: p.id("send").is_enabled(), "a ready document cannot be asked")
        self.check(p.focus() == "question", "choosing a document does not lead to the question")
        mock.pace = 0.08
        p.asked("Who keeps the light?")
        self.until(lambda: p.answers() and "The keeper" in p.answers()[0], "no piece of the answer before its end")
        self.check("the text says" not in p.answers()[0], "the answer came all at once")
        self.check(p.all(".answer")[0].get_attribute("aria-busy") == "true", "a live region is read out at every piece")
        self.check(
            p.id("stop").is_displayed() and not p.id("send").is_displayed(), "no stop button while an answer is written"
        )
        self.shot("answering")
        self.until(lambda: "11 tokens, the first after" in p.answers()[0], "the end of the answer is not told")
        self.check("The keeper of the light is Ida Fenwick, the text says." in p.answers()[0], f"answer: {p.answers()}")
        self.check(p.all(".answer")[0].get_attribute("aria-busy") == "false", "the answer stays busy")
        log = p.all(".log:not([hidden])")[0]
        self.check(
            (log.get_attribute("role"), log.get_attribute("aria-live")) == ("log", "polite"),
            "answers are no live region",
        )
        self.check(p.id("send").is_displayed() and not p.id("stop").is_displayed(), "the stop button stays")
        # the second question knows the first
        mock.pace = 0
        p.asked("Since when?")
        self.until(lambda: len(p.answers()) == 2 and "11 tokens" in p.answers()[1], "no second answer")
        asked = json.loads([r for r in mock.requests if r[1] == "/v1/chat/completions"][-1][3])
        self.check(
            [m["role"] for m in asked["messages"]] == ["user", "assistant", "user"], f"messages: {asked['messages']}"
        )
        self.check(
            asked["document"] in mock.documents and asked["stream"] and asked["model"] == "mock-135m",
            f"request: {asked}",
        )
        # documents have conversations of their own
        p.all("#list .name")[1].click()
        self.check(p.answers() == [], "the conversation of another document is shown")
        p.all("#list .name")[0].click()
        self.check(len(p.answers()) == 2, "the conversation is lost on the way")
        p.id("clear").click()
        self.check(p.answers() == [], "a new conversation still shows the old one")
        # Shift+Enter is a new line
        p.id("question").send_keys("a", Keys.SHIFT, Keys.ENTER, Keys.NULL, "b")
        self.check(p.id("question").get_property("value") == "a\nb", "Shift+Enter makes no new line")
        p.id("question").clear()
        mock.answers.append({"pieces": ["cut ", "short"], "end": "length"})
        p.asked("At length?")
        self.until(
            lambda: p.answers() and "Cut at the longest answer allowed." in p.answers()[-1], "a cut answer looks whole"
        )
        self.quiet("answers")

    def test_stop(self):
        p, mock = self.page, self.mock
        for how in ("button", "Escape", "Escape before the first word"):
            before, broken = len(p.answers()), mock.broken_pipes
            early = how.endswith("word")
            mock.answers.append({"pieces": [""] if early else ["Once ", "upon "], "end": "hang"})
            p.asked("Tell me a story.")
            self.until(
                lambda b=before, e=early: len(p.answers()) == b + 1 and (e or "upon" in p.answers()[-1]),
                f"stop by {how}: no answer",
            )
            if how == "button":
                p.id("stop").click()
            else:
                p.type(Keys.ESCAPE)
            self.until(lambda: "Stopped" in p.answers()[-1], f"stop by {how}: not stopped")
            self.until(lambda b=broken: mock.broken_pipes == b + 1, f"stop by {how}: the server still writes")
            self.check(p.focus() == "question", f"stop by {how}: the focus is on {p.focus()}")
        p.asked("And now?")
        self.until(lambda: "11 tokens" in p.answers()[-1], "after a stop nothing can be asked")
        asked = json.loads([r for r in mock.requests if r[1] == "/v1/chat/completions"][-1][3])
        self.check(
            {"role": "assistant", "content": "Once upon "} in asked["messages"], "a stopped answer is not remembered"
        )
        p.id("clear").click()
        self.quiet("stop")

    def test_delete(self):
        p, mock = self.page, self.mock
        there = len(p.all("#list li"))
        name = p.all("#list .name")[0].text
        p.all("#list .head .small")[0].click()
        self.check(
            p.id("delete").is_displayed() and name[:200] in p.id("delete").text, "deleting does not ask, or not by name"
        )
        p.type(Keys.ESCAPE)
        self.check(not p.id("delete").is_displayed() and len(p.all("#list li")) == there, "Escape deletes")
        p.all("#list .head .small")[0].click()
        p.id("delete").find_element(By.CSS_SELECTOR, "button[value=yes]").click()
        self.until(lambda: len(p.all("#list li")) == there - 1, "the document is still there")
        self.check(len(mock.documents) == there - 1, "the server still has it")
        self.check(p.focus() == p.all("#list .name")[0].text, f"after deleting the focus is on {p.focus()}")
        with mock.lock:  # another client deletes one: the page notices, at the latest when it is asked
            gone = list(mock.documents)[0]
        p.all("#list .name")[-1].click()
        with mock.lock:
            del mock.documents[gone]
        p.asked("Still there?")
        self.until(lambda: len(p.all("#list li")) == there - 2, "a document deleted by somebody else stays")
        self.quiet("delete", [404])

    def test_keyboard(self):
        """From the first Tab to a deleted document without a mouse."""
        p, mock = self.page, self.mock
        with mock.lock:
            mock.documents.clear()
        self.open(mock.url)
        self.until(lambda: p.id("model").text, "the page does not start")
        order = [p.tab() for _ in range(6)]
        self.check(
            order == ["Skip to the question", "file", "Paste text", "ratio", "question", "Answer settings"],
            f"focus order: {order}",
        )
        ring = p.js("""const s = getComputedStyle(document.activeElement);
            return s.outlineStyle !== "none" && parseFloat(s.outlineWidth) >= 2""")
        self.check(ring, "the focus cannot be seen")
        while p.tab(back=True) != "Paste text":
            pass
        p.type(Keys.ENTER)
        self.check(p.tab() == "paste-name", "the paste box does not open by keyboard")
        p.type("By keyboard", Keys.TAB, "Typed words.", Keys.TAB, Keys.ENTER)
        self.until(lambda: "kept whole" in p.text("#list"), "a text cannot be added by keyboard")
        for _ in range(8):
            if p.tab() == "By keyboard":
                break
        self.check(p.focus() == "By keyboard", "the document cannot be reached by keyboard")
        p.type(Keys.ENTER, "Who?", Keys.ENTER)
        self.until(lambda: p.answers() and "11 tokens" in p.answers()[0], "a question cannot be asked by keyboard")
        while p.tab(back=True) != "Delete By keyboard":
            pass
        p.type(Keys.ENTER)
        self.check(p.focus() == "Keep it", "the safe answer is not the first")
        p.type(Keys.TAB, Keys.ENTER)
        self.until(lambda: not mock.documents, "a document cannot be deleted by keyboard")
        self.until(lambda: p.focus() == "file", f"after the last document the focus is on {p.focus()}")
        unnamed = p.js("""return [...document.querySelectorAll("button, input, textarea, progress, dialog")]
            .filter(n => !n.labels?.length && !n.textContent.trim())
            .filter(n => !n.ariaLabel && !n.getAttribute("aria-labelledby"))
            .map(n => n.outerHTML)""")
        self.check(not unnamed, f"without a name for a screen reader: {unnamed}")
        self.quiet("keyboard")

    def fill(self):
        """A page as it looks in use, for the pictures and the narrow window."""
        mock = self.mock
        with mock.lock:
            mock.documents.clear()
        mock.pace = 0
        mock.add("letters-1912.txt", "x" * 31000, step=4)
        mock.add("harbour-log.txt", "x" * 108000, ratio=20, step=4)
        mock.hold = True
        doc = mock.add("manual.txt", "x" * 64000, step=2)
        doc["created"] -= 60
        self.open(mock.url)
        self.until(lambda: self.page.id("send").is_enabled(), "no document to ask")
        mock.answers += [
            {"pieces": words("The letter was opened by Ida Fenwick, keeper of the light at Carrow, on 3 March 1912.")},
            {"pieces": words("Because the seal was already broken when the boat brought it, she writes.")},
        ]
        for i, question in enumerate(("Who opened the letter?", "Why did she not wait for the harbour master?")):
            self.page.asked(question)
            self.until(
                lambda n=i: len(self.page.answers()) == n + 1 and "tokens" in self.page.answers()[n], "no answer"
            )
        mock.hold = False

    def test_looks(self):
        p = self.page
        self.fill()
        self.shot("wide")
        for width in (390, 320):
            p.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
            p.driver.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": True},
            )
            self.check(
                p.js("return document.documentElement.scrollWidth <= innerWidth"),
                f"{width} pixels: it scrolls sideways",
            )
            if width == 390:
                p.js("scrollTo(0, 0)")
                self.shot("narrow")
                p.js("scrollTo(0, 1e6)")
                self.shot("narrow-end")
        p.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        p.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})
        p.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
        )
        colours = p.js("const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]")
        self.check(colours == ["rgb(21, 23, 26)", "rgb(231, 233, 236)"], f"dark: {colours}")
        self.shot("dark")
        p.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        self.quiet("looks")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--require", action="store_true")
    parser.add_argument("--shots")
    parser.add_argument("--akv")
    parser.add_argument("--model")
    parser.add_argument("--text")
    args = parser.parse_args()
    missing = [
        what
        for what, there in (
            ("Selenium for Python", webdriver),
            ("chromium", shutil.which("chromium")),
            ("chromedriver", shutil.which("chromedriver")),
        )
        if not there
    ]
    if missing:
        print(
            f"{'FAILED' if args.require else 'skipped'}: not here: {', '.join(missing)} (make check-page brings them)",
            file=sys.stderr,
        )
        return 1 if args.require else 77
    if args.shots:
        os.makedirs(args.shots, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the browser ends with the test
    mock = Mock().start()
    with tempfile.TemporaryDirectory() as folder:
        page = Page(os.path.join(folder, "profile"))
        try:
            test = Test(page, mock, folder, args.shots)
            for step in (
                test.test_documents,
                test.test_drop_and_paste,
                test.test_answers,
                test.test_stop,
                test.test_hostile,
                test.test_delete,
                test.test_errors,
                test.test_server_gone,
                test.test_key,
                test.test_keyboard,
                test.test_looks,
            ):
                step()
            if args.akv:
                with open(args.text, encoding="utf-8") as file:
                    test.test_server(args.akv, args.model, file.read()[:5000])
        finally:
            page.driver.quit()
    print(f"{test.failures} of {test.checks} checks failed" if test.failures else f"{test.checks} checks passed")
    return 1 if test.failures else 0


if __name__ == "__main__":
    sys.exit(main())
