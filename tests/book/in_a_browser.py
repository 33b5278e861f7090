"""The book in a real browser: make book-test.

It needs Playwright, a Chromium, and what make book fetches.
"""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_bus import BLOCKS
from lesson_answers import ANSWERS
from processes import ROOT

playwright = pytest.importorskip(
    "playwright.sync_api", reason="pip install playwright"
)

SITE = ROOT / "book/site"
AXE = ROOT / "build/axe/axe.min.js"
PAGES = sorted(path.name for path in SITE.glob("*.html"))
EXAMPLE = "figure:has(textarea)"  # those for clients are for reading
RUNNABLE = [n for n in PAGES if "<figure" in (SITE / n).read_text("utf-8")]
ALIKE = ("sbus-", "sbus_")  # the pages of source, of which axe looks at one
LOOKED_AT = [n for n in PAGES if n[:5] not in ALIKE or n == "sbus-4.html"]
PLAY_MS = 120_000  # for Python to start and an example to be played
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")

if not (SITE / "pyodide").exists():
    pytest.skip("make book has not got pyodide", allow_module_level=True)


class Handler(http.server.SimpleHTTPRequestHandler):
    extensions_map = {
        **http.server.SimpleHTTPRequestHandler.extensions_map,
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where the book is served."""
    handler = functools.partial(Handler, directory=str(SITE))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser, this machine's or Playwright's own."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    with playwright.sync_playwright() as running:
        try:
            browser = running.chromium.launch(
                executable_path=found, args=["--no-sandbox"]
            )
        except playwright.Error as error:
            pytest.skip(f"no Chromium: {error.message.splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Any, address: str) -> Iterator[Any]:
    """A window; nothing may be wrong on its console, or come from afar."""
    window = chromium.new_page(base_url=address)
    wrong: list[str] = []

    def note(said: Any) -> None:
        is_icon = said.location["url"].endswith("/favicon.ico")
        if said.type in ("error", "warning") and not is_icon:
            wrong.append(said.text)

    def check(request: Any) -> None:
        if not request.url.startswith((address, "data:", "blob:")):
            wrong.append(request.url)

    def fail(request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":  # by leaving the page
            wrong.append(f"{request.url}: {request.failure}")

    window.on("console", note)
    window.on("request", check)
    window.on("pageerror", lambda error: wrong.append(str(error)))
    window.on("requestfailed", fail)
    yield window
    assert not wrong
    window.close()


def outcome(page: Any, place: str) -> tuple[str, str]:
    """Wait until something has been played; return how it went."""
    output = page.locator(f"{place} output")
    output.and_(page.locator(".good, .bad")).wait_for(timeout=PLAY_MS)
    return output.get_attribute("class"), output.text_content()


def visit(page: Any, name: str) -> None:
    """Go to a page, and wait for what it does by itself."""
    page.goto(name)
    if name == "bench.html":
        outcome(page, "#bench")


def tab_to(page: Any, selector: str) -> None:
    """Press Tab until something has the focus."""
    for _ in range(300):
        page.keyboard.press("Tab")
        if page.evaluate(f"document.activeElement.matches({selector!r})"):
            return
    raise AssertionError(f"no way to {selector}")


class TestPages:
    @pytest.mark.parametrize("name", LOOKED_AT)
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_axe_finds_nothing(
        self, page: Any, name: str, scheme: str
    ) -> None:
        """In the light; in the dark, where colours alone are others."""
        page.emulate_media(color_scheme=scheme)
        visit(page, name)
        page.add_script_tag(path=AXE)
        only = {"runOnly": ["color-contrast"]} if scheme == "dark" else {}
        run = "only => axe.run(only).then(result => result.violations)"
        violations = page.evaluate(run, only)
        assert not [
            (one["id"], one["nodes"][0]["html"])
            for one in violations
            if one["impact"] in ("serious", "critical")
        ]

    def test_a_narrow_window_is_enough(self, page: Any) -> None:
        """No page is wider, and each is there in well under a second."""
        page.set_viewport_size({"width": 360, "height": 640})
        for name in PAGES:
            page.goto(name)
            assert page.evaluate("document.body.scrollWidth") <= 360, name
            entry = "performance.getEntriesByType('navigation')[0]"
            print(f"{name}: {page.evaluate(entry)['loadEventEnd']:.0f} ms")

    def test_every_link_resolves(self, page: Any, address: str) -> None:
        """Those that scripts make, too."""
        links: set[str] = set()
        for name in PAGES:
            page.goto(name)
            found = page.evaluate("[...document.links].map(a => a.href)")
            links |= {one.partition("#")[0] for one in found}
        ours = [one for one in links if one.startswith(address)]
        assert len(ours) >= len(PAGES)
        for link in ours:
            assert urllib.request.urlopen(link).status == 200

    def test_it_can_be_read_without_scripts(
        self, chromium: Any, address: str
    ) -> None:
        """Rules, code, examples; and no button that does nothing."""
        window = chromium.new_page(java_script_enabled=False)
        window.goto(f"{address}2-routing-keys.html")
        assert window.locator("#MATCH-2 figure tr").count() > 40
        assert window.locator("#MATCH-2 aside pre").first.is_visible()
        buttons = window.locator("#MATCH-2 button")
        assert buttons.count() and not buttons.first.is_visible()
        window.close()

    def test_it_can_be_printed(self, page: Any) -> None:
        """Dark on white, without what can be pressed or filled in."""
        red = re.compile(r"rgb\((\d+)")
        for name in LOOKED_AT:
            page.emulate_media(media="screen", color_scheme="dark")
            visit(page, name)
            page.emulate_media(media="print")
            some = "document.querySelectorAll('button, input, textarea')"
            seen = f"[...{some}].some(one => one.checkVisibility())"
            assert not page.evaluate(seen), name
            style = "getComputedStyle(document.body)"
            ink = red.match(page.evaluate(f"{style}.color"))
            paper = red.match(page.evaluate(f"{style}.backgroundColor"))
            assert ink and int(ink[1]) < 60, name
            assert paper and int(paper[1]) > 200, name
        page.goto("5-flood-control.html")
        assert page.pdf().count(b"/Type /Page\n") > 5


class TestPlayer:
    @pytest.mark.parametrize("name", RUNNABLE)
    def test_every_example_runs_as_it_says(self, page: Any, name: str) -> None:
        """With the outcome that the specification says."""
        page.goto(name)
        figures = page.locator(EXAMPLE)
        for index in range(figures.count()):
            figure = figures.nth(index)
            figure.get_by_role("button").click()
            place = f"#{figure.get_attribute('id')}"
            verdict, said = outcome(page, place)
            assert verdict == "good", f"{place}: {said}"

    def test_all_examples_are_there(self) -> None:
        """Those above are all of the specification, and more."""
        texts = "".join((SITE / n).read_text("utf-8") for n in RUNNABLE)
        for block in BLOCKS:
            assert f'id="example-{block.name}"' in texts
        assert texts.count("<figure") > len(BLOCKS)

    def test_an_example_can_be_edited(self, page: Any) -> None:
        """The step that fails says so; the server says what it decides."""
        page.goto("3-protocol.html")
        place = "#example-subscription-lasts"
        page.locator(f"{place} summary").click()
        page.locator(f"{place} textarea").fill("A > HELLO\nA < MSG a\\0x")
        page.locator(f"{place} button").click()
        verdict, said = outcome(page, place)
        assert verdict == "bad" and "step 2" in said
        assert page.locator(f"{place} .failed").count() == 1
        decided = page.locator(f"{place} tbody tr").first.text_content()
        assert "disconnect A [PKT-2] unknown packet kind" in decided

    @pytest.mark.parametrize("path", [n for n in RUNNABLE if "lesson" in n])
    def test_questions_accept_right_answers_alone(
        self, page: Any, path: str
    ) -> None:
        """By the keyboard."""
        page.goto(path)
        for question in page.locator(".question").all():
            name = question.get_attribute("id")
            right, wrong = ANSWERS[name.partition("-")[2]]
            for answers, verdict in ((wrong, "bad"), (right, "good")):
                for answer in answers:
                    question.locator("input").fill(answer)
                    question.locator("input").press("Enter")
                    got = outcome(page, f"#{name}")
                    assert got[0] == verdict, f"{name}: {answer}: {got}"


class TestBench:
    def lines(self, page: Any) -> list[str]:
        """Return the conversation, once it has been played."""
        outcome(page, "#bench")
        return str(page.locator("#lines").input_value()).splitlines()

    def test_the_keyboard_is_enough(self, page: Any) -> None:
        """From the top of the page to a packet sent, read, and undone."""
        page.goto("bench.html#text=")
        outcome(page, "#bench")
        tab_to(page, "[name=packet]")
        page.keyboard.press("Control+A")
        page.keyboard.type("SUB k")
        page.keyboard.press("Escape")  # the list of suggestions
        page.keyboard.press("Enter")
        assert self.lines(page) == ["A > SUB k"]
        page.locator("body").click(position={"x": 1, "y": 1})
        tab_to(page, "[name=c]")
        page.keyboard.press("ArrowRight")
        tab_to(page, "[name=packet]")
        page.keyboard.press("Control+A")
        page.keyboard.type(r"MSG k\0hello")
        page.keyboard.press("Tab")
        page.keyboard.press("Space")
        assert self.lines(page) == ["A > SUB k", r"B > MSG k\0hello"]
        card = page.locator("article").first
        playwright.expect(card).to_contain_text("unread1")
        tab_to(page, "[data-go=undo]")
        page.keyboard.press("Enter")
        page.wait_for_function("lines.value == 'A > SUB k'")

    def test_the_address_is_the_state(self, page: Any, chromium: Any) -> None:
        """Somebody else who opens it sees the same."""
        page.goto("bench.html#text=")
        for button in ("Connect as this process", "Set the room", "Wait"):
            outcome(page, "#bench")
            page.get_by_role("button", name=button).click()
        page.wait_for_function("lines.value.includes('wait')")
        lines = self.lines(page)
        assert lines == ["A process uid=1001 gid=100", "A room 1", "wait 1"]
        page.wait_for_selector("text=the clock shows 1 s")
        other = chromium.new_page()
        other.goto(page.url)
        assert self.lines(other) == lines
        other.close()

    def test_single_steps(self, page: Any) -> None:
        """Back and on; what is not taken is pale."""
        page.goto("bench.html")
        assert len(self.lines(page)) == 3
        page.get_by_role("button", name="One step back").click()
        page.wait_for_function("document.querySelectorAll('.later').length==1")
        page.get_by_role("button", name="One step back").click()
        page.wait_for_function("document.querySelectorAll('.later').length==2")
        page.get_by_role("button", name="One step on").click()
        page.wait_for_function("document.querySelectorAll('.later').length==1")
        page.get_by_role("button", name="All steps").click()
        page.wait_for_function("document.querySelectorAll('.later').length==0")

    def test_a_lesson_can_say_where_to_stop(self, page: Any) -> None:
        """Its link leads to the bench after so many steps."""
        page.goto("lesson-2-hearing.html")
        page.locator("#example-counted a", has_text="on the bench").click()
        outcome(page, "#bench")
        card = page.locator("article").first
        playwright.expect(card).to_contain_text("k × 2")
        page.get_by_role("button", name="One step on").click()
        page.wait_for_function("document.querySelectorAll('.later').length==2")
        playwright.expect(card).not_to_contain_text("× 2")

    def test_a_blank_at_the_end_is_sent(self, page: Any) -> None:
        """The empty pattern is behind it."""
        page.goto("bench.html#text=")
        outcome(page, "#bench")
        page.locator("[name=packet]").fill("SUB ")
        for _ in range(2):
            page.get_by_role("button", name="Send").click()
            page.wait_for_function("lines.value.endsWith('SUB ')")
            outcome(page, "#bench")
        page.wait_for_function("lines.value == 'A > SUB \\nA > SUB '")
        verdict, said = outcome(page, "#bench")
        assert verdict == "good" and "disconnect" not in said

    def test_decisions_are_links(self, page: Any) -> None:
        """To the rule in its chapter."""
        page.goto("bench.html")
        outcome(page, "#bench")
        page.get_by_role("link", name="[SUB-1]").click()
        page.wait_for_url("**/3-protocol.html#SUB-1")


def test_a_page_without_a_player_says_so(page: Any, tmp_path: Path) -> None:
    """A page that is a file can be read, and says why it cannot play."""
    for name in ("bench.html", "page.js", "style.css", "worker.js"):
        shutil.copy(SITE / name, tmp_path)
    window = page.context.browser.new_page()
    window.goto((tmp_path / "bench.html").as_uri())
    verdict, said = outcome(window, "#bench")
    assert verdict == "bad" and "README" in said
    window.close()


def test_a_book_without_pyodide_says_so(page: Any, address: str) -> None:
    """Where it could not be fetched."""
    window = page.context.browser.new_page()
    window.route("**/pyodide/**", lambda route: route.abort())
    window.goto(f"{address}bench.html")
    verdict, said = outcome(window, "#bench")
    assert verdict == "bad" and "without pyodide" in said
    window.close()
