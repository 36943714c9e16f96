# SPDX-License-Identifier: Apache-2.0
"""What the tests of the page share: Chromium with words for what a person does and sees, and counted checks."""

import json
import os
import shutil
import sys
import time

try:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
except ImportError:
    if os.path.realpath(sys.executable) != os.path.realpath("/usr/bin/python3") and os.path.exists("/usr/bin/python3"):
        os.execv("/usr/bin/python3", ["/usr/bin/python3", *sys.argv])  # Debian's package belongs to Debian's Python
    webdriver = None


class Page:
    """The browser, with words for what a person does and sees."""

    def __init__(self, folder, size="1200,900"):
        options = webdriver.ChromeOptions()
        for flag in (
            "--headless=new",
            "--no-sandbox",
            "--disable-dev-shm-usage",
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-component-update",
            "--no-first-run",
            "--force-prefers-reduced-motion",
            "--hide-scrollbars",
            f"--window-size={size}",
            f"--user-data-dir={folder}",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        ):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(service=Service(shutil.which("chromedriver")), options=options)
        self.driver.set_page_load_timeout(30)
        self.urls = []
        self.console = []
        self.driver.get("about:blank")
        self.gather()  # what the browser's own first page does is not ours
        self.urls.clear()

    def id(self, name):
        return self.driver.find_element(By.ID, name)

    def all(self, css):
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def js(self, script, *args):
        return self.driver.execute_script(script, *args)

    def focus(self):
        """What has the focus: its id, or the text or label it shows."""
        return self.js("""const a = document.activeElement;
            return a.id || a.getAttribute("aria-label") || a.textContent.trim() || a.tagName""")

    def type(self, *keys):
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()

    def tab(self, *, back=False):
        chain = webdriver.ActionChains(self.driver)
        (
            chain.key_down(Keys.SHIFT).send_keys(Keys.TAB).key_up(Keys.SHIFT) if back else chain.send_keys(Keys.TAB)
        ).perform()
        return self.focus()

    def text(self, css):
        return "\n".join(node.text for node in self.all(css))

    def answers(self):
        return [node.text for node in self.all(".log:not([hidden]) .answer")]

    def asked(self, question):
        self.id("question").send_keys(question, Keys.ENTER)

    def upload(self, *paths):
        self.id("file").send_keys("\n".join(paths))

    def gather(self):
        """Console messages and addresses since the last call."""
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated"):
                params = message["params"]
                self.urls.append(params["request"]["url"] if "request" in params else params["url"])
        fresh = self.driver.get_log("browser")
        self.console += fresh
        return fresh


class Checks:
    def __init__(self, page, mock, folder, shots):
        self.page, self.mock, self.folder, self.shots = page, mock, folder, shots
        self.checks = self.failures = 0

    def check(self, condition, text):
        self.checks += 1
        if not condition:
            self.failures += 1
            print("FAILED: " + text, file=sys.stderr)
        return condition

    def until(self, what, text, seconds=10):
        """Looks again until `what()` holds; a failure otherwise."""
        end = time.monotonic() + seconds
        while True:
            value = what()
            if value or time.monotonic() > end:
                return self.check(
                    value, f"{text}; the page says:\n{self.page.driver.find_element(By.TAG_NAME, 'body').text}"
                )
            time.sleep(0.03)

    def file(self, name, content):
        path = os.path.join(self.folder, name)
        with open(path, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
        return path

    def open(self, url):
        self.page.driver.get(url)

    def quiet(self, where, statuses=()):
        """No console message but those that a browser writes for provoked HTTP errors; nothing sent elsewhere."""
        for entry in self.page.gather():
            provoked = entry["source"] == "network" and any(
                f"status of {status}" in entry["message"] for status in statuses
            )
            self.check(provoked, f"{where}: console: {entry['message']}")
        base = self.page.js("return location.origin") + "/"
        for url in self.page.urls:
            self.check(url.startswith((base, "data:", "about:")), f"{where}: a request to {url}")
        self.page.urls.clear()

    def shot(self, name):
        if self.shots:
            self.page.driver.save_screenshot(os.path.join(self.shots, name + ".png"))
