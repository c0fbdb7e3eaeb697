"""The page in a headless browser, on a scripted engine; screenshots go to the test's folder."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import uvicorn

from dspine.server.app import make_app
from dspine.server.routes import routes
from tests.support.fake_engine import VOCAB
from tests.support.served import PATIENCE, SlowTarget, make_service, says, until
from tests.support.toy_target import OracleSampler

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
sync_api = pytest.importorskip("playwright.sync_api")
TEXT = "One two three, one two three, one two three."


class Site:
    """A served page and the target behind it."""

    def __init__(self, text: str, slots: int = 1) -> None:
        targets = [SlowTarget(says(text), VOCAB, n_ctx=2048) for _ in range(slots)]
        self.target = targets[0]
        self.service = make_service(*targets, max_tokens=900, parts={"make_sampler": OracleSampler})
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        config = uvicorn.Config(make_app(self.service, routes()), log_config=None)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))
        self._thread.start()
        assert self.service.thread.wait_ready(PATIENCE)
        until(lambda: self._server.started)
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}/"

    def close(self) -> None:
        self.target.may_go.set()
        self._server.should_exit = True
        self._thread.join(PATIENCE)
        self._socket.close()


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site(TEXT)
    yield made
    made.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:  # type: ignore[name-defined]
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: sync_api.Browser, site: Site) -> Iterator[sync_api.Page]:  # type: ignore[name-defined]
    opened = browser.new_page()
    faults: list[str] = []
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.goto(site.address)
    opened.get_by_text("ready").wait_for()
    yield opened
    opened.close()
    assert faults == []


def ask(page: sync_api.Page, text: str = "Hello") -> None:  # type: ignore[name-defined]
    page.get_by_label("Question").fill(text)
    page.get_by_role("button", name="Send").click()


def test_an_answer_streams_and_shows_who_wrote_it(
    page: sync_api.Page,  # type: ignore[name-defined]
    tmp_path: Path,
) -> None:
    ask(page)
    page.locator(".message.assistant footer").wait_for()
    assert page.locator(".message.assistant .text").inner_text() == TEXT
    accepted, drafted = page.locator("#rate").inner_text().split(" of ")
    assert 0 < int(accepted) <= int(drafted)
    assert page.locator(".message.assistant .token.drafted").count() == int(accepted)
    assert page.locator(".message.assistant .token.plain").count() > 0
    assert "tokens/s" in page.locator("#speed").inner_text()
    assert page.locator("#slots rect").count() >= 1
    page.screenshot(path=tmp_path / "answer.png")


def test_drafting_can_be_switched_off(page: sync_api.Page) -> None:  # type: ignore[name-defined]
    page.get_by_label("Draft", exact=True).uncheck()
    ask(page)
    page.locator(".message.assistant footer").wait_for()
    assert page.locator("#rate").inner_text() == "nothing drafted"
    assert page.locator(".message.assistant .token.drafted").count() == 0


def test_stop_keeps_the_text_and_again_answers_anew(
    page: sync_api.Page,  # type: ignore[name-defined]
    site: Site,
) -> None:
    site.target.next_token = says("x" * 800)
    site.target.may_go.clear()
    ask(page)
    page.get_by_role("button", name="Stop").click()
    site.target.may_go.set()
    page.get_by_role("button", name="Stop").wait_for(state="hidden")
    site.target.next_token = says(TEXT)
    if page.get_by_role("button", name="Answer again").is_enabled():
        page.get_by_role("button", name="Answer again").click()
    else:
        ask(page)
    page.locator(".message.assistant footer").wait_for()
    assert page.locator(".message.assistant .text").last.inner_text() == TEXT


def test_an_error_of_the_server_is_shown_where_the_answer_would_be(
    page: sync_api.Page,  # type: ignore[name-defined]
) -> None:
    ask(page, "x" * 3000)
    fault = page.locator(".message.fault")
    fault.wait_for()
    assert "leaves no room" in fault.inner_text()


def test_plain_decoding_is_measured(page: sync_api.Page) -> None:  # type: ignore[name-defined]
    page.get_by_label("Tokens at most").fill("20")
    page.route("**/v1/chat/completions", lambda route: route.continue_())
    page.get_by_role("button", name="Measure plain decoding").click()
    page.locator("#plain-speed", has_text="tokens/s").wait_for()


def test_a_page_is_answered_beside_others(browser: sync_api.Browser) -> None:  # type: ignore[name-defined]
    busy = Site(TEXT, slots=2)
    try:
        body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
        pages = [browser.new_page() for _ in range(2)]
        for page in pages:
            page.goto(busy.address)
            page.get_by_text("ready").wait_for()
        busy.target.may_go.clear()
        with ThreadPoolExecutor(1) as pool:
            headers = {"Content-Type": "application/json"}
            asked = Request(f"{busy.address}v1/chat/completions", body, headers)
            other = pool.submit(lambda: json.load(urlopen(asked, timeout=PATIENCE)))
            for page in pages:
                ask(page)
            busy.target.may_go.set()
            assert other.result()["choices"][0]["message"]["content"] == TEXT
        for page in pages:
            page.locator(".message.assistant footer").wait_for()
            assert page.locator(".message.assistant .text").inner_text() == TEXT
            accepted, drafted = page.locator("#rate").inner_text().split(" of ")
            # Of its own answer alone, not of all that the server makes.
            assert page.locator(".message.assistant .token.drafted").count() == int(accepted)
            assert 0 < int(accepted) <= int(drafted) < len(TEXT) * 2
            page.close()
    finally:
        busy.close()


def test_narrow_and_dark(
    browser: sync_api.Browser,  # type: ignore[name-defined]
    site: Site,
    tmp_path: Path,
) -> None:
    phone = browser.new_page(viewport={"width": 390, "height": 780}, color_scheme="dark")
    phone.goto(site.address)
    ask(phone)
    phone.locator(".message.assistant footer").wait_for()
    width = phone.evaluate("document.documentElement.scrollWidth")
    assert width <= 390
    assert not phone.locator("#panel").is_visible()  # there is no room beside the answer
    phone.get_by_role("button", name="Panel").click()
    assert phone.locator("#panel").is_visible()
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    phone.screenshot(path=tmp_path / "phone.png")
    phone.close()


def test_the_keyboard_is_enough(page: sync_api.Page) -> None:  # type: ignore[name-defined]
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    page.locator(".message.assistant footer").wait_for()
    assert page.evaluate("document.activeElement.id") == "question"


@pytest.mark.parametrize("by_https", [True, False], ids=["https", "http"])
def test_an_answer_is_copied(
    page: sync_api.Page,  # type: ignore[name-defined]
    by_https: bool,
) -> None:
    if by_https:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    else:  # as a page of another machine
        page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    ask(page)
    page.locator(".message.assistant footer").wait_for()
    button = page.get_by_role("button", name="Copy answer")
    button.focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Copied", exact=True).wait_for()
    assert page.evaluate("document.activeElement.className") == "copy"
    page.get_by_label("Question").focus()
    page.keyboard.press("Control+V")
    assert page.get_by_label("Question").input_value() == TEXT
    button.wait_for()  # its name is what it was


def test_a_long_answer_is_followed_to_its_end_unless_the_reader_scrolls_away(
    page: sync_api.Page,  # type: ignore[name-defined]
    site: Site,
) -> None:
    page.set_viewport_size({"width": 900, "height": 500})
    site.target.next_token = says("line\n" * 160)  # a chunk may have many lines
    ask(page)
    page.locator(".message.assistant footer").wait_for()
    left = "(log => log.scrollHeight - log.scrollTop - log.clientHeight)(messages)"
    assert page.evaluate(left) < 60
    page.evaluate("messages.scrollTop = 0")
    page.wait_for_function(f"{left} > 1000")
    page.get_by_role("button", name="Answer again").click()
    page.locator(".message.assistant footer").wait_for()
    assert page.evaluate("messages.scrollTop") < 60


def test_a_cut_answer_says_so_and_drafting_may_change_between_two_answers(
    page: sync_api.Page,  # type: ignore[name-defined]
) -> None:
    page.get_by_label("Tokens at most").fill("12")
    ask(page)
    footers = page.locator(".message.assistant footer")
    footers.first.wait_for()
    assert "cut at the limit" in footers.first.inner_text()
    page.get_by_label("Draft", exact=True).uncheck()
    page.get_by_label("Tokens at most").fill("200")
    ask(page, "And then?")
    footers.nth(1).wait_for()
    assert "cut" not in footers.nth(1).inner_text()
    assert page.locator("#rate").inner_text() == "nothing drafted"
    assert page.locator(".message.assistant").last.locator(".token.drafted").count() == 0


def test_a_question_that_failed_is_not_asked_again_with_the_next_one(
    page: sync_api.Page,  # type: ignore[name-defined]
) -> None:
    ask(page, "x" * 3000)
    page.locator(".message.fault").wait_for()
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "Short")
    assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "Short"}]
    page.locator(".message.assistant footer").wait_for()


def test_an_answer_that_breaks_off_and_a_server_that_is_gone_are_told(
    page: sync_api.Page,  # type: ignore[name-defined]
) -> None:
    body = 'data: {"choices":[{"index":0,"delta":{"content":"Half"}}]}\n\n'
    kind = {"content-type": "text/event-stream"}
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(status=200, headers=kind, body=body)
    )
    ask(page)
    page.locator(".message.fault", has_text="Half\nthe answer broke off").wait_for()
    page.unroute("**/v1/chat/completions")
    page.route("**/*", lambda route: route.abort())
    ask(page, "Again")
    page.locator(".message.fault", has_text="the server cannot be reached").wait_for()
    page.locator("#state", has_text="not reachable").wait_for()
    page.unroute("**/*")
    page.locator("#state", has_text="ready").wait_for()


def test_a_touch_keyboard_makes_new_lines(
    browser: sync_api.Browser,  # type: ignore[name-defined]
    site: Site,
) -> None:
    context = browser.new_context(
        viewport={"width": 390, "height": 780}, has_touch=True, is_mobile=True
    )
    phone = context.new_page()
    phone.goto(site.address)
    phone.get_by_text("ready").wait_for()
    phone.get_by_label("Question").fill("One")
    phone.get_by_label("Question").press("Enter")
    assert phone.get_by_label("Question").input_value() == "One\n"
    phone.get_by_role("button", name="Send").tap()
    phone.locator(".message.assistant footer").wait_for()
    assert phone.evaluate("document.activeElement.id") != "question"
    context.close()
