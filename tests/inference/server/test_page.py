"""The page in headless Chromium, driven by ChromeDriver's own protocol (https://www.w3.org/TR/webdriver2)."""

import base64
import os
import re
import shutil
import signal
import subprocess
import time

import pytest

httpx = pytest.importorskip("httpx", reason="httpx is not installed: pip install -e '.[dev]'")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER and os.environ.get("BROWSER_TESTS")),
    reason="tests in a browser need BROWSER_TESTS=1, and apt-get install chromium chromium-driver",
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of a reference to an element


class Browser:
    """One window."""

    def __init__(self, driver_url, profile):
        options = {
            "binary": CHROMIUM,
            "args": [
                *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
                *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
                *("--window-size=1200,850", f"--user-data-dir={profile}"),
            ],
        }
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.http = httpx.Client(base_url=driver_url, timeout=180)
        self.session = ""
        answer = self.ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = f"/session/{answer['sessionId']}"

    def ask(self, method, path, body=None):
        response = self.http.request(method, self.session + path, json=body if method == "POST" else None)
        value = response.json()["value"]
        assert response.status_code == 200, value
        return value

    def open(self, url):
        self.ask("POST", "/url", {"url": url})

    def run(self, script):
        """What some JavaScript returns."""
        return self.ask("POST", "/execute/sync", {"script": script, "args": []})

    def find(self, selector):
        return self.ask("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]

    def text(self, selector):
        return self.run(f"return document.querySelector('{selector}').textContent")

    def click(self, selector):
        self.ask("POST", f"/element/{self.find(selector)}/click", {})

    def write(self, selector, text):
        self.ask("POST", f"/element/{self.find(selector)}/clear", {})
        self.ask("POST", f"/element/{self.find(selector)}/value", {"text": text})

    def point_at(self, selector):
        origin = {ELEMENT: self.find(selector)}
        move = {"type": "pointerMove", "origin": origin, "x": 0, "y": 0}
        pointer = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]}
        self.ask("POST", "/actions", {"actions": [pointer]})

    def wait(self, condition, seconds=60):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.text("#status")
            time.sleep(0.02)

    def picture(self, path):
        path.write_bytes(base64.b64decode(self.ask("GET", "/screenshot")))

    def errors(self):
        return [entry["message"] for entry in self.ask("POST", "/se/log", {"type": "browser"})]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    driver = subprocess.Popen([DRIVER, "--port=0"], start_new_session=True, **streams)
    port = next(found[1] for line in driver.stdout if (found := re.search(r"started successfully on port (\d+)", line)))
    try:
        browser = Browser(f"http://127.0.0.1:{port}", tmp_path_factory.mktemp("profile"))
        yield browser
        browser.ask("DELETE", "")
        browser.http.close()
    finally:
        os.killpg(driver.pid, signal.SIGKILL)  # the browser, too, which might otherwise hold the pipe open for ever
        driver.communicate()


@pytest.fixture
def page(browser, served):
    browser.open(served.url)
    browser.wait(lambda: browser.text("#model").startswith("tiny"))
    yield browser
    assert browser.errors() == []


def generate(page, prompt, **settings):
    page.write("#prompt", prompt)
    for name, value in settings.items():
        page.write(f"[name={name}]", str(value))
    page.click("#generate")


def ended(page):
    page.wait(lambda: "seed" in page.text("#status"))


def test_text_streams_in_with_the_probability_of_each_token(page, served):
    generate(page, "né 日本 <b>&amp;", max_tokens=40, seed=3, temperature=0.7, top_k="", top_p=0.9, min_p=0.001)
    ended(page)
    body = {"prompt": "né 日本 <b>&amp;", "max_tokens": 40, "seed": 3, "temperature": 0.7, "top_p": 0.9, "min_p": 0.001}
    choice = httpx.post(f"{served.url}/v1/completions", json=body | {"logprobs": 5}).json()["choices"][0]
    assert page.text("#text") == "né 日本 <b>&amp;" + choice["text"]
    assert page.text("#status").startswith(f"{len(choice['logprobs']['tokens'])} tokens")

    page.point_at("#text .token")
    assert page.run("return !document.querySelector('#tip').hidden")
    best = max(choice["logprobs"]["top_logprobs"][0].values())
    shown = page.run("return document.querySelector('#tip tr td:nth-child(2)').textContent")
    assert shown == f"{100 * 2.718281828459045**best:.1f} %"
    assert page.run("return document.querySelectorAll('#tip .came').length") >= 1


LONG_TEXT = """
// 50,000 tokens at once, each as likely as its number says; the second half is a single line
const words = (i) => ` ${i}` + (i < 25000 && i % 20 === 19 ? "\\n" : "");
const event = (choices, more) => `data: ${JSON.stringify({ choices, ...more })}\\n\\n`;
const events = [];
for (let i = 0, at = 0; i < 50000; at += words(i).length, i++) {
  const text = words(i), p = Math.log([0.005, 0.05, 0.3, 0.9][i % 4]);
  const logprobs = { tokens: [text], token_logprobs: [p], top_logprobs: [{ [text]: p }], text_offset: [at] };
  events.push(event([{ index: 0, text, logprobs, finish_reason: null }]));
}
const end = event([], { usage: { completion_tokens: 50000 } }) + "data: [DONE]\\n\\n";
window.fetch = async () => new Response(events.join("") + end);
"""


def test_a_long_text_is_laid_out_in_parts(page):
    """At 50,000 tokens, a layout of all the text for each token would take hours."""
    page.run(LONG_TEXT)
    before = layouts(page)
    page.click("#generate")
    ended(page)
    assert layouts(page) - before < 1_000
    assert page.run("return Math.max(...[...text.children].map((block) => block.childElementCount))") <= 1_000

    whole = "".join(f" {i}" + ("\n" if i < 25_000 and i % 20 == 19 else "") for i in range(50_000))
    assert page.text("#text") == whole
    assert page.run("return text.scrollHeight - text.scrollTop - text.clientHeight") < 40  # the end is in sight
    shades = "return [...document.querySelectorAll('.token')].slice(-4).map((token) => token.className)"
    assert page.run(shades) == ["token p0", "token p1", "token p2", "token p3"]
    page.run("document.querySelectorAll('.token')[24_002].id = 'there'")
    page.run("document.querySelector('#there').scrollIntoView()")
    page.point_at("#there")
    assert page.text("#tip") == "␣2400230.0 %"
    copied = page.run("""
        getSelection().selectAllChildren(text);
        const copy = new ClipboardEvent("copy", { clipboardData: new DataTransfer(), cancelable: true });
        text.dispatchEvent(copy);
        return copy.clipboardData.getData("text/plain")""")
    assert copied == whole


def layouts(page):
    """How often the browser has computed where things are."""
    page.ask("POST", "/goog/cdp/execute", {"cmd": "Performance.enable", "params": {}})
    metrics = page.ask("POST", "/goog/cdp/execute", {"cmd": "Performance.getMetrics", "params": {}})["metrics"]
    return next(metric["value"] for metric in metrics if metric["name"] == "LayoutCount")


def test_what_was_read_before_is_said(page):
    for _ in range(2):
        generate(page, "y" * 300, max_tokens=2, seed=1)
        ended(page)
    assert ", 255 of 300 prompt tokens were read before; seed 1" in page.text("#status")


SLOW_READING = """
// a stream that says how far a prompt is read, and goes on when it is asked to
const bytes = new TextEncoder();
window.fetch = async () => new Response(new ReadableStream({ start(stream) {
  stream.enqueue(bytes.encode(": 256 of 5001 prompt tokens read\\n\\n"));
  window.goOn = () => { stream.enqueue(bytes.encode("data: [DONE]\\n\\n")); stream.close(); };
} }));
"""


def test_the_progress_of_a_long_prompt_is_shown(page):
    page.run(SLOW_READING)
    page.click("#generate")
    page.wait(lambda: page.text("#status") == "256 of 5001 prompt tokens read")
    page.run("window.goOn()")
    page.wait(lambda: page.run("return !document.querySelector('#generate').disabled"))


def test_a_text_that_was_stopped_goes_on(page, served):
    generate(page, "a", max_tokens=5_000, temperature=0, top_k="", seed=1)
    page.wait(lambda: len(page.text("#text")) > 20)
    page.click("#stop")
    ended(page)
    assert page.text("#status").startswith("stopped")
    before = page.text("#text")
    with httpx.Client() as client:
        page.wait(lambda: client.get(f"{served.url}/health").json()["writing"] == 0)
    page.run("document.querySelector('[name=max_tokens]').value = 3")
    page.click("#continue")
    ended(page)
    assert page.text("#text").startswith(before)
    assert len(page.text("#text")) > len(before)


def test_the_prompts_probabilities_are_shown(page):
    page.click("#echo")
    generate(page, "é!", max_tokens=1, seed=1)
    ended(page)
    shown = "return [...document.querySelectorAll('#text .token')].slice(0, 2).map(e => e.textContent)"
    assert page.run(shown) == ["é", "!"]
    page.point_at("#text .token")
    assert page.run("return document.querySelectorAll('#tip table').length") == 2  # a character of two tokens


def test_what_the_server_refuses_is_said(page):
    page.run("document.querySelector('#prompt').value = 'x'.repeat(2001)")
    page.click("#generate")
    page.wait(lambda: "at most 2000" in page.text("#status"))
    assert page.run("return document.querySelector('#status').classList.contains('wrong')")
    assert page.run("return !document.querySelector('#generate').disabled")
    assert len(page.errors()) == 1  # the browser's own line about status 400


@pytest.fixture
def chat(browser, chat_served):
    browser.open(chat_served.url)
    browser.wait(lambda: browser.text("#model").startswith("talker"))
    yield browser
    assert browser.errors() == []


def messages(page):
    return page.run("return [...document.querySelectorAll('.message')].map((one) => one.textContent)")


def test_a_conversation_is_held_with_the_keyboard_and_begun_anew(chat, chat_served):
    for name, value in {"max_tokens": 40, "seed": 3, "temperature": 0.7, "top_k": ""}.items():
        chat.write(f"[name={name}]", str(value))
    chat.write("#system", "Be brief.")
    talk = [{"role": "system", "content": "Be brief."}]
    for turn, words in enumerate(["né <b>&amp;", "two\ue008\ue007\ue000lines"]):  # shift and enter
        chat.write("#message", words + "\ue007")
        chat.wait(lambda turn=turn: len(messages(chat)) == 2 * turn + 2 and "seed" in chat.text("#status"))
        talk.append({"role": "user", "content": ["né <b>&amp;", "two\nlines"][turn]})
        body = {"messages": talk, "max_tokens": 40, "seed": 3, "temperature": 0.7}
        talk.append(httpx.post(f"{chat_served.url}/v1/chat/completions", json=body).json()["choices"][0]["message"])
    names = {"user": "You", "assistant": "Model"}
    assert messages(chat) == [names[one["role"]] + one["content"] for one in talk[1:]]
    assert chat.run("return document.querySelector('#talk').ariaBusy") == "false"
    chat.click("#new")
    assert messages(chat) == []
    chat.click("#view")
    generate(chat, "x", max_tokens=3)
    chat.wait(lambda: chat.text("#text").startswith("x"))


def test_an_answer_is_stopped_and_a_refused_message_comes_back(chat):
    for name, value in {"max_tokens": 4000, "temperature": 0}.items():
        chat.write(f"[name={name}]", str(value))
    chat.write("#message", "a")
    chat.click("#send")
    chat.wait(lambda: len(messages(chat)[1:][0]) > len("Model") + 20)
    chat.ask("POST", f"/element/{chat.find('body')}/value", {"text": "\ue00c"})  # escape
    chat.wait(lambda: chat.text("#status").startswith("stopped"))
    chat.run("document.querySelector('#message').value = 'x'.repeat(2001)")
    chat.click("#send")
    chat.wait(lambda: "at most 2000" in chat.text("#status"))
    assert len(messages(chat)) == 2
    assert chat.run("return document.querySelector('#message').value.length") == 2001
    assert len(chat.errors()) == 1  # the browser's own line about status 400


def test_another_model_has_no_chat(page):
    hidden = "return [...document.querySelectorAll('.of-chat, #view')].every((one) => one.offsetParent === null)"
    assert page.run(hidden)
