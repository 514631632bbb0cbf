"""The page at /, in Chromium: the chat and the live view as a person with keyboard, mouse or screen reader meets them.

FULCRUM_SCREENSHOTS=FOLDER keeps page-light.png and page-dark.png.
"""

import base64
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from fulcrum.v1 import inference_pb2 as pb
from fulcrum.v1 import inference_pb2_grpc as rpc

ENTER, SHIFT, ESCAPE, TAB, RELEASE = "\ue007", "\ue008", "\ue00c", "\ue004", "\ue000"  # W3C WebDriver, 17.4.2
FLAGS = (
    *("headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking", "disable-sync"),
    *("disable-component-update", "disable-quic", "disable-dev-shm-usage", "window-size=1200,1000"),
)
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script> & **bold**"
# Of each element with text of its own that can be seen: its contrast (WCAG 2.2, 1.4.3), where that is too low.
CONTRAST = """
const parse = (text) => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => [r, g, b].map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (node) => { for (; node; node = node.parentElement) {
  const colour = parse(getComputedStyle(node).backgroundColor);
  if (colour.length === 3 || colour[3]) return colour; } };
const own = (node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
return [...document.querySelectorAll("body *")]
  .filter((node) => node.checkVisibility() && !node.closest("[aria-hidden]") && own(node)).map((node) => {
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
    return [node.tagName, node.textContent.slice(0, 20), (a + 0.05) / (b + 0.05)];
  }).filter(([, , ratio]) => ratio < 4.5);
"""
# Whether the pool is drawn in the colours of the theme.
PAINTED = """(() => { const pool = document.querySelector("#pool");
const wanted = getComputedStyle(document.documentElement).getPropertyValue("--free").trim();
const copy = new OffscreenCanvas(pool.width, pool.height).getContext("2d", { willReadFrequently: true });
copy.drawImage(pool, 0, 0);
const pixels = copy.getImageData(0, 0, pool.width, pool.height).data;
for (let at = 0; at < pixels.length; at += 4)
  if ("#" + [...pixels.slice(at, at + 3)].map((part) => part.toString(16).padStart(2, "0")).join("") === wanted)
    return true;
return false; })()"""
NAMELESS = """
const named = (node) => node.ariaLabel || node.labels?.length || node.textContent.trim()
  || document.getElementById(node.getAttribute("aria-labelledby"));
return [...document.querySelectorAll("input, select, textarea, button, [role], section, canvas, svg")]
  .filter((node) => !named(node)).map((node) => node.outerHTML.slice(0, 80));
"""


class Browser:
    """One tab of a headless Chromium, by the W3C WebDriver protocol."""

    def __init__(self, driver: str, session: str) -> None:
        self._url = f"{driver}/session/{session}"
        self._http = httpx.Client(timeout=60)

    def call(self, method: str, path: str, **body: Any) -> Any:
        answer = self._http.request(method, self._url + path, json=body if method == "POST" else None)
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value

    def go(self, url: str) -> None:
        self.call("POST", "/url", url=url)

    def js(self, body: str) -> Any:
        return self.call("POST", "/execute/sync", script=body, args=[])

    def cdp(self, command: str, **params: Any) -> Any:
        return self.call("POST", "/goog/cdp/execute", cmd=command, params=params)

    def type(self, css: str, text: str) -> None:
        (element,) = self.call("POST", "/element", using="css selector", value=css).values()
        self.call("POST", f"/element/{element}/value", text=text)

    def press(self, key: str) -> None:
        strokes = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self.call("POST", "/actions", actions=[{"type": "key", "id": "keyboard", "actions": strokes}])

    def until(self, expression: str, seconds: float = 60) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := self.js(f"return {expression}")):
            assert time.monotonic() < deadline, f"{expression}: {self.js('return document.body.innerText')}"
            time.sleep(0.05)
        return value

    def log(self, kind: str) -> list[dict[str, Any]]:
        """What has been logged since the last call."""
        found: list[dict[str, Any]] = self.call("POST", "/se/log", type=kind)
        return found

    def theme(self, name: str) -> None:
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def close(self) -> None:
        self.call("DELETE", "")
        self._http.close()


def chromium() -> tuple[str, str]:
    """The paths of the browser and its driver; skips without them, but in CI it fails."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        reason = "there is no chromium with chromedriver here (Debian: apt-get install chromium chromium-driver)"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    return str(browser), str(driver)


@contextmanager
def printing(command: list[str], pattern: str, log: Path) -> Iterator[str]:
    """Runs a program until the block is left; gives what `pattern` finds in a line of its standard output."""
    env = os.environ | {"XDG_CONFIG_HOME": str(log.parent), "TMPDIR": str(log.parent)}  # a browser leaves crumbs
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
    try:
        assert process.stdout is not None
        found = next((match for line in process.stdout if (match := re.search(pattern, line))), None)
        assert found, log.read_text()
        yield found[1]
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    binary, driver = chromium()
    folder = tmp_path_factory.mktemp("chromium")
    with printing([driver, "--port=0"], r"started successfully on port (\d+)", folder / "driver.log") as port:
        args = [f"--{flag}" for flag in FLAGS] + [f"--user-data-dir={folder / 'profile'}"]
        asked = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": binary, "args": args},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        url = f"http://127.0.0.1:{port}"
        answer = httpx.post(f"{url}/session", json={"capabilities": {"alwaysMatch": asked}}, timeout=120).json()
        assert "sessionId" in answer["value"], answer
        tab = Browser(url, answer["value"]["sessionId"])
        yield tab
        tab.close()


FACTS = "[...document.querySelectorAll('#log .assistant > .help')].at(-1)?.textContent"
ANSWER = "[...document.querySelectorAll('#log .assistant > .text')].at(-1)?.textContent"


def line(number: int) -> str:
    return f"document.querySelectorAll('#lines b')[{number}].textContent"


async def test_a_chat_and_what_the_engine_does(served: Any, admin: Any, client: Any, browser: Browser) -> None:
    await admin.idle()
    browser.log("performance")
    browser.go(served.http)
    browser.until("document.querySelector('#model').value === 'smollm2' && !document.querySelector('#view').hidden")

    # To the end, by the keyboard alone; the same text as over the API.
    browser.js("document.querySelector('details').open = true")
    browser.type("#temperature", "0")
    browser.type("#max-tokens", "24")
    browser.type("#message", f"What is gravity?{SHIFT}{ENTER}{RELEASE}Say it shortly.{ENTER}")
    facts = browser.until(f"{FACTS}.includes('length') && {FACTS}")
    assert re.fullmatch(r"24 tokens · [\d.,]+/s · first after [\d,]+ ms · length", facts)
    messages = [{"role": "user", "content": "What is gravity?\nSay it shortly."}]
    body = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 24}
    whole = httpx.post(f"{served.http}/v1/chat/completions", json=body, timeout=60).json()
    assert browser.js(f"return {ANSWER}") == whole["choices"][0]["message"]["content"]
    assert browser.js("return document.querySelector('#message').value") == ""
    said = browser.js("return document.querySelector('#said').textContent")
    assert said.endswith(facts), "a screen reader hears of the end"

    # Stopped by Esc, while the live view shows this sequence and others beside it.
    browser.js("document.querySelector('#max-tokens').value = 4000")
    browser.type("#message", f"Write a long story about a lighthouse keeper and his cat.{ENTER}")
    browser.until(f"{line(0)} === '1'")
    others = []
    for subject in ("gravity", "light", "sound", "heat"):
        asked = [{"role": "user", "content": f"Explain in many words to a curious child what {subject} is."}]
        endless = {"stream": True, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
        others.append(await client.chat.completions.create(model="smollm2", messages=asked, **endless))
    browser.until(f"{line(0)} === '5'")
    browser.until(f"Number({line(2)}) > 4")  # of a step
    browser.until("document.querySelectorAll('#tree rect.locked').length > 0")
    browser.until(f"{ANSWER}.length > 20")
    check_both_themes(browser)
    for other in others:
        await other.close()
    browser.press(ESCAPE)
    browser.until(f"{FACTS}.includes('stopped')")
    assert browser.js("return document.activeElement.id") == "message"
    await admin.idle()
    browser.until(f"{line(0)} === '0'")
    for number in range(2, 6):  # rows of a step, tokens/s, TTFT, ITL
        browser.until(f"Number({line(number)}.replaceAll(',', '')) > 0 || {number} === 3")

    # The map's pages are the pages that the stats count; the prompts' common beginning was found again.
    stats = await admin.stats()
    counted = [f"{count:,}" for count in (stats.used_pages, stats.cached_pages, stats.free_pages)]
    shown = "['used', 'cached', 'free'].map((id) => document.getElementById(id).textContent).join()"
    browser.until(f"{shown} === '{','.join(counted)}'")
    assert browser.js("return document.querySelector('#pool').ariaLabel").startswith(
        f"KV pool of {stats.total_pages:,}"
    )
    assert stats.cached_pages > 0
    hits = "Math.max(...[...document.querySelectorAll('#nodes tr')].map((row) => Number(row.cells[4].textContent)))"
    assert browser.js(f"return {hits}") >= 1

    check_access(browser)
    assert [entry for entry in browser.log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    asked = re.findall(r'"url":"(\w+:[^"]*)"', " ".join(entry["message"] for entry in browser.log("performance")))
    assert asked
    assert {url for url in asked if not url.startswith((f"{served.http}/", "data:", "about:", "chrome:"))} == set()


def check_both_themes(browser: Browser) -> None:
    """Contrast; the pool's canvas is drawn anew; screenshots."""
    for theme in ("light", "dark"):
        browser.theme(theme)
        browser.until(f"matchMedia('(prefers-color-scheme: {theme})').matches")
        browser.js("document.querySelectorAll('details').forEach((each) => (each.open = true))")
        assert browser.js(CONTRAST) == []
        browser.js("document.querySelectorAll('details').forEach((each) => (each.open = false))")
        browser.js("document.querySelector('#log').scrollTop = 0; scrollTo(0, 0)")
        browser.until(PAINTED)
        if folder := os.environ.get("FULCRUM_SCREENSHOTS"):
            png = base64.b64decode(browser.call("GET", "/screenshot"))
            assert len(png) < 150_000
            (Path(folder) / f"page-{theme}.png").write_bytes(png)


def check_access(browser: Browser) -> None:
    """Names, landmarks, the order of the keyboard, little room, little motion."""
    browser.js("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    assert browser.js(NAMELESS) == []
    assert browser.js("return document.documentElement.lang") == "en"
    headings = browser.js("return [...document.querySelectorAll('h1, h2, h3')].map((each) => Number(each.tagName[1]))")
    assert headings[0] == 1
    assert all(below - above <= 1 for above, below in pairwise(headings))
    browser.js("document.querySelector('#message').value = ''; document.querySelector('.skip').focus()")
    reached = []
    for _ in range(9):
        browser.press(TAB)
        reached.append(browser.js("return document.activeElement.id || document.activeElement.tagName"))
    assert reached == ["SUMMARY", "model", "system", "temperature", "max-tokens", "key", "log", "message", "send"]
    browser.cdp("Emulation.setDeviceMetricsOverride", width=320, height=640, deviceScaleFactor=1, mobile=False)
    browser.until("innerWidth === 320")
    assert browser.js("return document.documentElement.scrollWidth") <= 320
    browser.cdp("Emulation.clearDeviceMetricsOverride")
    calm = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    browser.cdp("Emulation.setEmulatedMedia", features=calm)
    moving = "[...document.querySelectorAll('*')].filter((each) => getComputedStyle(each).transitionDuration !== '0s')"
    assert browser.js(f"return {moving}.length") == 0


class Hostile(rpc.InferenceServiceServicer):
    """An engine whose model writes markup, or which fails in the middle."""

    def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        return pb.GetModelResponse(served_names=[HOSTILE], max_model_len=64)

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        asked = request.chat.messages[-1].content[0].text
        if asked == "refuse":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"refused: {HOSTILE}")
        yield pb.GenerateResponse(accepted=pb.Accepted(request_id="r", model="m"))
        yield pb.GenerateResponse(delta=pb.Delta(reasoning=f"thought {HOSTILE}"))
        yield pb.GenerateResponse(delta=pb.Delta(text=HOSTILE))
        if asked == "break":
            context.abort(grpc.StatusCode.ABORTED, f"broken: {HOSTILE}")
        yield pb.GenerateResponse(finished=pb.Finished(reason=pb.FINISH_REASON_STOP, completion_tokens=9))
        yield pb.GenerateResponse(usage=pb.Usage(prompt_tokens=1, completion_tokens=9))


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[Callable[..., AbstractContextManager[str]]]:
    """Starts gateways in front of it, with these flags, which know no administration."""
    server = grpc.server(ThreadPoolExecutor(8))
    rpc.add_InferenceServiceServicer_to_server(Hostile(), server)
    probe = health.HealthServicer()
    probe.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(probe, server)
    engine = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    command = [sys.executable, "-m", "cli", "gateway", f"--engine={engine}", "--port=0", "--grace=1"]
    yield lambda *flags: printing([*command, *flags], r"OpenAI API\s+(http://\S+)/v1", tmp_path / "log")
    server.stop(0).wait()


def test_what_a_model_writes_is_text(hostile: Any, browser: Browser) -> None:
    """Also its name, its reasoning and its errors; and without a live view the page says how to get one."""
    with hostile() as url:
        check_hostile(url, browser)


def check_hostile(url: str, browser: Browser) -> None:
    browser.go(url)
    browser.until("document.querySelector('#live-state').textContent.includes('--engine-admin')")
    browser.until("document.querySelector('#model').value")
    texts: Callable[[str], Any] = lambda css: browser.js(  # noqa: E731
        f"return [...document.querySelectorAll('{css}')].map((each) => each.textContent)"
    )
    assert texts("#model option") == [HOSTILE]
    browser.type("#message", f"speak{ENTER}")
    browser.until(f"{FACTS}?.includes('stop')")
    assert texts("#log .assistant > .text") == [HOSTILE]
    assert texts("#log details .text") == [f"thought {HOSTILE}"]
    assert browser.js("return document.querySelector('#log details').open") is False
    assert "9 tokens" in browser.js(f"return {FACTS}")
    for asked, error in (("refuse", f"refused: {HOSTILE}"), ("break", f"broken: {HOSTILE}")):
        browser.js("document.querySelector('#fresh').click(); document.querySelector('#message').value = ''")
        browser.type("#message", f"{asked}{ENTER}")
        browser.until("document.querySelector('#log [role=alert]')")
        assert texts("#log .error .text") == [error]
        browser.until("!document.querySelector('#send').disabled")
        kept = asked if asked == "refuse" else ""  # what had no answer can be sent again
        assert browser.js("return document.querySelector('#message').value") == kept
    assert browser.js("return document.title") == "Fulcrum"
    assert browser.js("return document.querySelectorAll('#log img, #log script, #log b').length") == 0


def test_a_key_opens_the_chat_and_only_one_with_admin_the_live_view(
    hostile: Any, browser: Browser, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(
        "".join(f"{word} sha256:{sha256(word.encode()).hexdigest()} {word}\n" for word in ("admin", "gateway"))
    )
    with hostile(f"--api-key-file={keys}") as url:
        browser.go(url)
        browser.until("document.querySelector('#log [role=alert]')?.textContent.includes('API key')")
        browser.until("document.querySelector('#live-state').textContent.includes('API key')")
        browser.js("document.querySelector('details').open = true")
        for key, told in (("gateway", "(admin)"), ("admin", "--engine-admin")):
            browser.js("document.querySelector('#key').value = ''")
            browser.type("#key", f"{key}{TAB}")
            browser.until(f"document.querySelector('#live-state').textContent.includes('{told}')")
            browser.until("document.querySelector('#model').value")
        assert browser.js("return document.querySelectorAll('#log [role=alert]').length") == 0
        browser.type("#message", f"speak{ENTER}")
        browser.until(f"{FACTS}?.includes('9 tokens')")
        kept = browser.js("return [sessionStorage.getItem('key'), localStorage.length, document.cookie]")
        assert kept == ["admin", 0, ""]
