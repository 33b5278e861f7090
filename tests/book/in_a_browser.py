"""The book in a real browser: make book-test.

It needs Playwright, a Chromium, and what make book writes and fetches.
"""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from html import escape, unescape
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

import sbus
from conformance.examples import PARSERS, read_blocks
from conformance.report import Run
from conformance.rules import read_rules
from cut_stage import LAST, program
from implementations import page as report
from lesson_answers import ANSWERS
from pack_python import PART_BYTES
from processes import ROOT

playwright = pytest.importorskip(
    "playwright.sync_api", reason="pip install playwright"
)

pytestmark = pytest.mark.timeout(900)  # the machine may be busy
SITE = ROOT / "book/site"
AXE = ROOT / "build/axe/axe.min.js"
SHOTS = ROOT / "build/book-shots"
PLAY_MS = 300_000  # for Python to start and an example to be played
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run"
    " --disable-background-networking --disable-component-update"
    " --disable-sync"
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PAGES = {
    str(path.relative_to(SITE)): path.read_text("utf-8")
    for path in sorted(SITE.glob("**/*.html"))
    if "pyodide" not in path.parts
}

if not (SITE / "pyodide/pyodide.mjs").exists():
    pytest.skip("make book has not got pyodide", allow_module_level=True)


# ---- A server, a browser and its windows


class Handler(http.server.SimpleHTTPRequestHandler):
    extensions_map = {
        **http.server.SimpleHTTPRequestHandler.extensions_map,
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    starts = 0  # of Python

    def log_message(self, *_: Any) -> None:
        Handler.starts += self.path.endswith("parts.json")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where the book is served."""
    yield from serve(SITE)


def serve(site: Path, kind: type[Handler] = Handler) -> Iterator[str]:
    """Serve a folder until nobody needs it."""
    handler = functools.partial(kind, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser, this machine's or Playwright's own."""
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    with playwright.sync_playwright() as running:
        try:
            browser = running.chromium.launch(
                executable_path=executable, args=FLAGS.split()
            )
        except playwright.Error as error:
            pytest.skip(f"no Chromium: {error.message.splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def new_context(chromium: Any, address: str) -> Callable[..., Any]:
    """What makes a browser that knows nothing yet."""

    def new_context(**more: Any) -> Any:
        context = chromium.new_context(**{"base_url": address, **more})
        context.set_default_timeout(PLAY_MS)
        return context

    return new_context


@pytest.fixture(scope="module")
def context(new_context: Callable[..., Any]) -> Any:
    """What all windows have in common, Python's worker as well."""
    return new_context()


@pytest.fixture
def page(context: Any, address: str) -> Iterator[Any]:
    """A window; nothing may be wrong on its console, or come from afar."""
    window = context.new_page()
    wrong: list[str] = []

    def note(said: Any) -> None:
        is_icon = said.location["url"].endswith("/favicon.ico")
        if said.type in ("error", "warning") and not is_icon:
            wrong.append(said.text)

    def check(request: Any) -> None:
        if not request.url.startswith((address, "data:", "blob:")):
            wrong.append(request.url)

    window.on("console", note)
    window.on("request", check)
    window.on("pageerror", lambda error: wrong.append(str(error)))
    yield window
    assert not wrong
    window.close()


@pytest.fixture(params=[1280, 400])
def sized(page: Any, request: Any) -> Iterator[Any]:
    """A wide window and a narrow one, in which all has room."""
    page.set_viewport_size({"width": request.param, "height": 900})
    yield page
    assert page.evaluate(OVERFLOW) <= request.param


@pytest.fixture
def fresh(new_context: Callable[..., Any]) -> Iterator[Any]:
    """A window of a browser that knows nothing yet."""
    context = new_context()
    yield context.new_page()
    context.close()


def press(place: Any, name: Any) -> None:
    """Press a button."""
    place.get_by_role("button", name=name).click()


def outcome(place: Any) -> tuple[str, str]:
    """Wait until something has been played; return how it went."""
    output = place.locator("output").first
    output.and_(place.page.locator(".good, .bad")).wait_for(timeout=PLAY_MS)
    return output.get_attribute("class"), output.text_content()


def run(page: Any, name: str) -> tuple[str, str]:
    """Run an example; return how it went."""
    example = page.locator(f"[data-name={name}]")
    press(example, f"Run {name}")
    return outcome(example)


def try_orders(page: Any, name: str) -> Any:
    """Try every order of an example; return the ends that are found."""
    example = page.locator(f"[data-name={name}]")
    press(example, "Try every order")
    output = example.locator("output").first
    output.and_(page.locator(".good")).wait_for(timeout=PLAY_MS)
    return example.locator(".ends .example")


def tab_to(page: Any, is_there: str) -> None:
    """Press Tab until the focus is where it is wanted."""
    for _ in range(300):
        page.keyboard.press("Tab")
        if page.evaluate(f"document.activeElement.{is_there}"):
            break


# ---- What all pages have


def ids_of(page: str) -> set[str]:
    """Return the anchors of a page, each of which is there once."""
    ids = re.findall(r'<[^>]* id="([^"]*)"', page)
    assert len(ids) == len({*ids})
    return {*ids}


def links_of(page: str) -> Iterator[tuple[str, str]]:
    """Yield where a page leads to within the book: a file and an anchor."""
    for link in re.findall(r'<[^>]* (?:href|src)="([^"]*)"', page):
        if link and link[:6] != "#text=" and "://" not in link:
            file, _, anchor = unescape(link).partition("#")
            yield file.partition("?")[0], anchor


# Kinds of pages, what is pressed there, and what is there before a look
STAR = "[data-name=star-crosses-slashes-star-in-short]"
RUN, GOOD, BAD = "button:has-text('Run')", "output.good", "output.bad"
DONE = "output:is(.good, .bad)"
KINDS = {
    "start": ("book/index.html", "", "#first"),
    "lesson": ("book/lessons/2-hearing.html", RUN, GOOD),
    "orders": (
        "book/lessons/6-waiting.html",
        "[data-name=too-late] button:has-text('every order')",
        "[data-name=too-late] .ends .example .lanes",
    ),
    "surprise": (
        "book/surprise.html#chapter=5&seed=1",
        "#surprise:has(.lanes) button:has-text('Play it')",
        f"#surprise {BAD}",
    ),
    "playground": ("book/bench.html", "", f"#bench {GOOD}"),
    "stage": (
        "book/stages/2.html",
        "button:has-text('Run the kit')",
        f"form.stage {BAD}",
    ),
    "mistakes": ("book/mistakes.html", f"{STAR} {RUN}", f"{STAR} {DONE}"),
    "python": ("book/python.html", "", "article"),
    "chapter": ("spec/5-flood-control.html", "", ".kept .hll"),
    "examples": ("spec/examples/3-protocol.html", RUN, GOOD),
    "matrix": ("spec/traceability.html", "", "article"),
    "source": ("book/source/sbus-5.html", "", "article"),
    "implementers": ("book/implementers.html", "", "article"),
    "teaching": ("book/teaching.html", "", "article"),
    "search": ("search.html?q=stalled", "", ".search-summary"),
}


def test_every_link_resolves() -> None:
    """To a file of the book, and to an anchor if it names one."""
    ids = {name: ids_of(text) for name, text in PAGES.items()}
    for name, text in PAGES.items():
        for file, anchor in links_of(text):
            target = ((SITE / name).parent / file).resolve()
            target = target if file else SITE.resolve() / name
            assert target.exists(), f"{name}: {file}"
            known = ids.get(str(target.relative_to(SITE.resolve())))
            assert not known or not anchor or anchor in known, (
                f"{name}: {file}#{anchor}"
            )


def test_every_rule_stands_above_its_code() -> None:
    """The lines that keep it are marked, and are no docstrings."""
    for rule in read_rules().values():
        page = PAGES[f"spec/{rule.file[:-3]}.html"]
        shown = page.partition(f'id="{rule.id}">')[2]
        shown = shown.partition('<div class="rule')[0]
        marked = re.findall(r'<span class="hll">(.*)', shown)
        assert rule.id in ("KEY-2", "KEY-6") or marked, rule.id
        for line in marked:
            code = unescape(re.sub("<[^>]*>", "", line))
            assert not re.match(r' *\d+ *("""|#)', code), (rule.id, code)


def test_ids_are_links_with_their_sentences() -> None:
    """In chapters, lessons, the matrix and the source."""
    sentence = escape(read_rules()["PUB-2"].sentence, quote=False)
    link = re.compile(f'#PUB-2" class="id" title="{re.escape(sentence)}')
    for name in (
        *("book/lessons/2-hearing", "book/source/sbus-2"),
        *("spec/traceability", "spec/3-protocol"),
    ):
        assert link.search(PAGES[f"{name}.html"]), name


def test_each_rule_is_printed_as_it_is_written() -> None:
    """Keys, patterns and bytes are code; nothing else is changed."""
    for rule in read_rules().values():
        card = PAGES[f"spec/{rule.file[:-3]}.html"].partition(
            f'id="{rule.id}">\n<p>'
        )[2]
        said = re.sub("</?code[^>]*>", "`", card.partition("</p>")[0])
        origins = re.findall('class="origin[^>]*>(.*?)<', said)
        said = said.partition("</a> ")[2].partition('<span class="ori')[0]
        said = unescape(re.sub("<[^>]*>", "", said))
        written = f"{' '.join(said.split())} ({', '.join(origins)})"
        assert written == rule.sentence


@pytest.mark.parametrize("file", ["sbus", "sbus_client"])
def test_the_source_is_whole_and_linked(file: str) -> None:
    """Each line is there once, with a number, and names lead to theirs."""
    names = [n for n in PAGES if re.search(rf"source/{file}-\d+\.", n)]
    text = "\n".join(PAGES[name] for name in names)
    marked = re.findall(r'<span id="L-(\d+)">(.*)', text)
    lines = (ROOT / f"{file}.py").read_text("utf-8").splitlines()
    assert len(marked) == len({number for number, _ in marked})
    shown = {int(number): html for number, html in marked}
    for number, line in enumerate(lines, 1):
        html = re.sub("<[^>]*>", "", shown.get(number, ""))
        assert unescape(html).lstrip(" 0123456789").strip() in line
        assert number in shown or not line, number
    links = re.findall(r'#L-(\d+)">(?:<[^>]*>|\.)*(\w+)', text)
    assert len(links) > 300
    for number, name in links:
        assert re.search(rf"\b{name}\b", lines[int(number) - 1]), name


def test_it_can_be_read_without_scripts(
    new_context: Callable[..., Any],
) -> None:
    """Rules, code, and examples as text; no button that does nothing."""
    window = new_context(java_script_enabled=False).new_page()
    window.goto("spec/2-routing-keys.html")
    assert "a*b" in window.locator("#example-star-in-short").inner_text()
    window.locator("#MATCH-2 .kept summary").first.click()
    assert window.locator("#MATCH-2 .kept .hll").first.is_visible()
    assert not window.locator("article button:visible").count() > 1
    names = "spec/2-routing-keys book/bench book/index book/stages/3"
    for name in names.split():
        window.goto(f"{name}.html")
        said = window.locator("article noscript p").first
        assert said.is_visible() and "JavaScript" in said.inner_text()
        assert not window.locator("article form button:visible").count()
    window.context.close()


@pytest.mark.parametrize("kind", KINDS)
def test_it_looks_well(page: Any, kind: str) -> None:
    """Wide and narrow, in light and dark: axe, sizes, and a picture."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    url, button, shown = KINDS[kind]
    for width, scheme in product((1280, 400), ("light", "dark")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.goto(url)
        page.evaluate(OPEN, 9)  # or it takes minutes
        if button:
            page.locator(button).first.click()
        page.locator(shown).first.wait_for(timeout=PLAY_MS)
        path = SHOTS / f"{kind}-{width}-{scheme}.png"
        page.screenshot(path=path, animations="disabled")
        assert page.evaluate(OVERFLOW) <= width
        assert not page.evaluate(SMALL)
        page.add_script_tag(path=AXE)
        faults = page.evaluate(FAULTS)
        assert not faults, (width, scheme, faults)


def test_a_report_fits_a_telephone(page: Any) -> None:
    """Of three servers; each rule has the whole width."""
    command = "python3 tests/a_server.py -f -a {address}"
    runs = [Run("server", f"server-{n}", command, []) for n in range(3)]
    page.set_viewport_size({"width": 400, "height": 900})
    page.set_content(report(runs, ROOT / "spec"))
    assert page.evaluate(OVERFLOW) <= 400
    assert page.locator("#MATCH-1 th").bounding_box()["width"] > 300
    assert page.get_by_text(command).first.bounding_box()["width"] > 200


def test_it_can_be_printed(page: Any) -> None:
    """Without the source, and what can be pressed or filled in."""
    page.goto("spec/5-flood-control.html")
    page.emulate_media(media="print")
    for left_out in "article button", ".kept", ".skip-to-content":
        assert not page.locator(f"{left_out}:visible").count()
    assert page.pdf().count(b"/Type /Page\n") in range(4, 9)


OVERFLOW = "document.documentElement.scrollWidth"
SMALL = """[...document.querySelectorAll("article *")].filter(
    (one) => one.checkVisibility() && one.innerText?.trim()
      && !one.matches(".headerlink, .headerlink *")
      && parseFloat(getComputedStyle(one).fontSize) < 11
).map((one) => one.outerHTML.slice(0, 80))"""
OPEN = """(count) => [...document.querySelectorAll("details")]
    .slice(0, count).forEach((fold) => { fold.open = true; })"""
BLOCK_STORAGE = """Object.defineProperty(window, "localStorage", {
    get() { throw new DOMException("blocked", "SecurityError"); } });"""
# Sphinx's captions of contents are headings without a level
FAULTS = """axe.run({ exclude: [".caption"] })
    .then(({ violations }) => violations)
    .then((all) => all.filter((one) => /serious|critical/.test(one.impact)))
    .then((all) => all.map((one) => [one.id, one.nodes[0].html]))"""


# ---- Examples and questions


def test_python_starts_once_for_all_pages(fresh: Any) -> None:
    """Before it is asked for; it stays while a reader moves on."""
    Handler.starts = 0
    with fresh.expect_request("**/worker.js"):
        fresh.goto("book/lessons/1-keys.html")
    press(fresh, "Run first-message")
    first = fresh.locator("[data-name=first-message]")
    said = first.locator("output")
    said.filter(has_text=re.compile("loading: .* MB|starts")).wait_for()
    assert outcome(first)[0] == "good"
    fresh.locator(".related-pages a.next-page").click()
    fresh.wait_for_url("**/2-hearing.html")
    assert run(fresh, "each-once")[0] == "good"
    assert Handler.starts == 1


@pytest.mark.parametrize(
    "name", [n for n in PAGES if 'class="example"' in PAGES[n]]
)
def test_every_example_runs_as_it_says(page: Any, name: str) -> None:
    """With the outcome that the specification says."""
    page.goto(name)
    page.evaluate(OPEN, 1_000)
    buttons = page.get_by_role("button", name=re.compile("^Run "))
    for button in buttons.all():
        button.click()
    runnable = ".example:has(textarea):not([data-kind=orders])"
    for example in page.locator(runnable).all():
        verdict, said = outcome(example)
        betrays = example.get_attribute("data-kind") == "broken"
        assert verdict == "good" or betrays, said


def test_all_examples_are_there() -> None:
    """Those above are all of the specification, and more."""
    texts = "".join(PAGES.values())
    for block in read_blocks():
        assert f'data-name="{block.name}"' in texts
    assert sum(block.kind in PARSERS for block in read_blocks()) > 200


def test_an_example_can_be_edited(page: Any) -> None:
    """What is outdated is pale; the step that fails says so."""
    page.goto("spec/6-echoes.html")
    example = page.locator("[data-name=echo-on]")
    text, outdated = map(example.locator, ("textarea", ".outdated"))
    press(example, "Edit")
    text.fill("A hums")
    press(example, "Run")
    assert outcome(example) == ("bad", "not a step: 'A hums'.")
    assert outdated.count() == 1
    text.fill("A > SUB k\nA > HELLO")
    press(example, "Run")
    example.locator(".failed").wait_for()
    said = outcome(example)[1]
    assert said.startswith("Line 2, “A > HELLO”: the packet begins with")
    assert not example.locator(".outdated, .failed .key").count()
    link = example.get_by_role("link", name="[PKT-2]").first
    assert "malformed packet" in link.get_attribute("title")
    assert link.get_attribute("href").endswith("3-protocol.html#PKT-2")
    press(example, "Reset")
    assert not example.locator(".failed, textarea:visible").count()
    assert run(page, "echo-on")[0] == "good"


@pytest.mark.parametrize("name", [n for n in PAGES if "/lessons/" in n])
def test_lessons_have_questions_hints_and_progress(
    page: Any, name: str
) -> None:
    """By the keyboard; what was answered is remembered."""
    page.goto(name)
    assert page.get_by_text(re.compile(r"Goal.*Time.*Before")).count()
    questions = page.locator("[data-kind=question]").all()
    assert len(questions) == 3
    for question in questions:
        right, wrong = ANSWERS[question.get_attribute("data-name")]
        assert question.locator("details p").count()
        field = question.get_by_label("Your answer")
        for answer in (wrong[0], *right):
            field.fill(answer)
            field.press("Enter")
            works = question.locator("output", has_text="works")
            works.wait_for(state="hidden")
            got = outcome(question)
            assert (got == ("good", "Right.")) == (answer in right)
    page.reload()
    assert page.get_by_text("You have answered 3 of the 3").count()


def test_a_wrong_answer_gets_a_hint_first(page: Any) -> None:
    """The answer only when it is asked for, from the second time on."""
    page.goto("book/lessons/1-keys.html")
    question = page.locator("[data-name=empty-run]")
    field = question.get_by_label("Your answer")
    answer = question.locator(".answer")
    for attempt in range(2):
        field.fill("MSG a/b/c\\0one")
        press(question, "Check")
        question.locator(".failed").wait_for()
        verdict, said = outcome(question)
        assert verdict == "bad" and said.startswith("Not yet. ")
        drawing = question.locator(".drawing").text_content()
        assert "two" not in said and "received" not in drawing
        assert question.get_by_text("Hint: A star may").is_visible()
        assert answer.is_visible() == (attempt == 1)
    assert not answer.locator("p").is_visible()
    answer.locator("summary").click()
    assert "two" in answer.locator("p").inner_text()
    press(question, "Reset")
    assert not question.locator(".answer:visible, .failed").count()
    field.fill("two")
    press(question, "Check")
    question.locator("output", has_text="Write a whole packet").wait_for()


def test_an_endless_run_harms_nobody(fresh: Any) -> None:
    """It ends by itself; Stop ends a long one, also for other pages."""
    other = fresh.context.new_page()
    other.goto("book/lessons/1-keys.html")
    assert run(other, "first-message")[0] == "good"
    endless = "wait 99999999\n" * 90
    fresh.goto("book/bench.html#" + urlencode({"text": endless}))
    bench = fresh.locator("#bench")
    verdict, said = outcome(bench)
    assert verdict == "bad" and said.endswith(" rounds.")
    assert run(other, "first-message")[0] == "good"

    fresh.goto("book/bench.html#" + urlencode({"text": LONG}))
    fresh.reload()
    outcome(bench)
    press(fresh, "Try every order")
    bench.get_by_text("states are tried").wait_for()
    press(fresh, "Stop")
    assert outcome(bench) == ("bad", "Stopped.")
    assert run(other, "first-message")[0] == "good"
    fresh.goto("book/bench.html#text=")
    fresh.reload()
    assert outcome(bench)[0] == "good"


# ---- Stages, and what a student writes there


def in_stage(page: Any, stage: int) -> tuple[Any, Any]:
    """Open the page of a stage; return its form and its editor."""
    page.goto(f"book/stages/{stage}.html")
    return page.locator("form.stage"), page.locator("#program")


def try_it(form: Any) -> tuple[str, str]:
    """Run the kit; return what it says."""
    form.evaluate("form => (form.elements.said.className = '')")
    press(form, "Run the kit")
    return outcome(form)


def texts(form: Any) -> list[str]:
    """Return what a student can go back to, the newest first."""
    values = "all => all.slice(1).map((one) => one.value)"
    programs: list[str] = form.locator(".work option").evaluate_all(values)
    return programs


START = program(1)  # of stage 2
SLIPS = {  # what a student writes in stage 2, and what is said of it
    "is not valid Python": START.replace("accept()", "accept("),
    "a loop without end": f"while True: 1\n{START}",
    "Missing next, for stage 2": START,
    "AttributeError": START.replace(
        "packet = client", "print('here')\n    client.x"
    ),
}
CHOSEN = "one => one.value.slice(one.selectionStart, one.selectionEnd)"
# No function of a page can end this, and Stop does
ENDLESS = "def handle(*_): all(iter(lambda: 1, 0))\n\n\nif __name__"


@pytest.mark.parametrize("width", [1700, 400])
def test_a_mistake_is_shown_where_it_is(page: Any, width: int) -> None:
    """In a sentence; its line, what it printed and what it knew."""
    page.set_viewport_size({"width": width, "height": 900})
    form, editor = in_stage(page, 2)
    for sentence, source in SLIPS.items():
        editor.fill(source)
        verdict, said = try_it(form)
        assert verdict == "bad" and sentence in said
    printed = form.locator(".lanes .failed .printed").inner_text()
    assert re.search(r"here\n.* in serve\n.* in read\nAttr", printed)
    press(form, "Show line")
    assert "client.x" in editor.evaluate(CHOSEN)
    machine = form.locator(".machine")
    assert "client.x.wire" in machine.locator(".ran").inner_text()
    assert "[A, B]" in machine.locator(".cards").first.inner_text()
    form.get_by_label("Time").press("Home")
    assert form.locator(".lanes .later").count() > 1
    assert "[A, B]" not in machine.inner_text()
    assert page.evaluate(OVERFLOW) <= width

    editor.fill(START.replace("if __name__", ENDLESS))
    press(form, "Run the kit")
    press(form, "Stop")
    assert outcome(form) == ("bad", "Stopped.")


@pytest.mark.parametrize("stage", range(1, LAST + 1))
def test_each_stage_can_be_played(page: Any, stage: int) -> None:
    """What it begins with lacks something, and our server nothing."""
    form, editor = in_stage(page, stage)
    press(form, "Start with the book’s stage")
    assert editor.input_value() == program(stage - 1)
    assert f"Missing next, for stage {stage}," in try_it(form)[1]
    form.get_by_text("Compare with our server").click()
    form.locator("ins").first.wait_for()
    shown = form.locator(".compared ins").all_inner_texts()
    lines = {line[1:] for line in shown}
    assert lines <= {*program(stage).splitlines()}
    editor.fill(program(stage))
    assert f"Passed: stage {stage}," in try_it(form)[1]


MARK = "# mine\n"  # of a student
FULL = """const set = Storage.prototype.setItem;
Storage.prototype.setItem = function (name, value) {
  if (value.length > 300) throw new DOMException("", "QuotaExceededError");
  set.call(this, name, value);
};"""
TRIES = """() => {
    const run = keep(bench.elements.text, "stage 8", {}, "");
    for (let n = 0; n < 60; n++) {
        bench.elements.text.value = `try ${n}`;
        run()("said", n === 3);
        bench.elements.text.dispatchEvent(new Event("input"));
    } }"""


def test_stages_one_to_three(
    sized: Any, new_context: Callable[..., Any], tmp_path: Path
) -> None:
    """With a break, another tab and a wrong button in each."""
    size = sized.viewport_size
    page = new_context(viewport=size).new_page()
    other = page.context.new_page()
    for stage in (1, 2, 3):
        form, editor = in_stage(page, stage)
        if stage > 1:  # what passed is where the next one begins
            assert editor.input_value() == MARK + program(stage - 1)
        half_done = f"{MARK}# half of {stage}\n" + program(stage - 1)
        editor.fill(half_done)
        press(form, "with the book’s")
        assert editor.input_value() == program(stage - 1)
        editor.press("Control+z")
        assert editor.input_value() == half_done
        page.reload()
        assert editor.input_value() == half_done

        there, editor_there = in_stage(other, stage)
        editor_there.fill("# there\n")
        form.get_by_text("Another tab is working on this").wait_for()
        page.reload()  # the text of this tab is there
        assert editor.input_value() == half_done
        editor.fill(MARK + program(stage))
        assert try_it(form)[0] == "good"
        other.reload()
        kept = {"# there\n", half_done, MARK + program(stage)}
        assert kept <= {*texts(form)} == {*texts(there)}

    # The rest of it is on another machine
    page.get_by_text("Keep a copy").click()
    with page.expect_download() as download:
        page.get_by_role("link", name="Download all my work").click()
    download.value.save_as(tmp_path / "work.json")
    assert page.evaluate(OVERFLOW) <= size["width"]
    page.context.close()
    page = new_context().new_page()
    form, _ = in_stage(page, 3)
    page.get_by_text("Keep a copy").click()
    field = page.get_by_label("Open a file")
    field.set_input_files(tmp_path / "work.json")
    form.get_by_text("Versions that were added: ").wait_for()
    assert in_stage(page, 4)[1].input_value() == MARK + program(3)
    page.context.close()


def test_what_passed_is_kept_longest(page: Any) -> None:
    """Whatever is tried later makes room for itself alone."""
    page.goto("book/bench.html#text=")
    page.evaluate(TRIES)
    versions = page.evaluate("versionsOf('stage 8').map((one) => one.text)")
    assert versions[0] == "try 3" and versions[-1] == "try 59"
    assert len(versions) == page.evaluate("VERSIONS_MAX + 1")


@pytest.mark.parametrize("script", [BLOCK_STORAGE, FULL])
def test_a_store_that_fails(fresh: Any, script: str) -> None:
    """It is said at once; versions, lessons and the kit still work."""
    fresh.add_init_script(script)
    form, editor = in_stage(fresh, 1)
    start = editor.input_value()
    editor.press("x")
    form.get_by_text("Your browser does not keep this").wait_for()
    assert try_it(form)[0] == "bad"
    press(form, "Start with")
    assert editor.input_value() == start and f"x{start}" in texts(form)
    fresh.on("dialog", lambda dialog: dialog.accept())
    fresh.goto("book/lessons/1-keys.html")
    assert fresh.locator(".lanes").count() > 3
    assert run(fresh, "first-message")[0] == "good"


def test_the_keyboard_is_enough(page: Any) -> None:
    """Tab indents and leaves, Enter keeps the place, a key runs."""
    form, editor = in_stage(page, 1)
    tab_to(page, "id === 'program'")
    page.keyboard.press("Control+a")
    page.keyboard.type("if 1:\n1 +")
    page.keyboard.press("Tab")
    page.keyboard.type("x\n")
    assert editor.input_value() == "if 1:\n    1 + x\n    "
    page.keyboard.press("Control+Enter")
    assert "line 2 stopped it: NameError" in outcome(form)[1]
    page.keyboard.press("Escape")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.matches('select')")
    page.keyboard.press("Alt+n")
    page.wait_for_url("**/2.html")
    page.goto("book/lessons/1-keys.html")
    page.keyboard.press("Control+Enter")
    assert outcome(page.locator(".example").first)[0] == "good"


# ---- The first page, and a slow line


def test_it_asks_before_it_tells(sized: Any) -> None:
    """Two questions on the first screen; nobody waits for Python."""
    sized.goto("book/index.html", wait_until="commit")
    first, flood = sized.locator("#first"), sized.locator("#flood")
    heard = first.locator(".yes")
    heard.nth(2).wait_for()
    first.get_by_label("Type a key").fill("alarm")
    assert heard.all_inner_texts() == ["Log\n✓ receives it"]
    assert first.locator(".done").all_inner_texts() == ["only the log"]
    first.get_by_label("Alarm").fill("")
    assert heard.count() == 2
    link = first.get_by_role("link", name="ask the real server")
    assert "MSG+alarm" in link.get_attribute("href")

    guess = flood.get_by_role("button", name="The last messages")
    box = guess.bounding_box()
    assert box["y"] + box["height"] < 900
    assert not flood.get_by_label("The reader takes").is_visible()
    guess.click()
    flood.get_by_text("No: nothing is lost.").wait_for()
    assert flood.get_by_label("The reader takes").is_visible()


def test_it_matches_as_the_server_does(page: Any) -> None:
    """Whatever is typed there."""
    page.goto("book/index.html")
    parts = [*product(("a", "b*", "*", "ab", ".", "", "é"), repeat=2)]
    sides = ["/".join(pair) for pair in parts] + ["", "a", "a/", "*"]
    pairs = [*product(sides, [key for key in sides if "*" not in key])]
    ours = "(pairs) => pairs.map(([text, key]) => matches(text, key))"
    assert page.evaluate(ours, pairs) == [
        bool(sbus.pattern_matches(text.encode(), key.encode()))
        for text, key in pairs
    ]


SLOW_BYTES = 75_000  # a second, of a line of 600 kbit/s


class SlowHandler(Handler):
    """A server on a slow line, which counts what goes over it."""

    line = threading.Lock()
    sent = 0

    def copyfile(self, source: Any, outputfile: Any) -> None:
        while "pyodide" in self.path and (data := source.read(4096)):
            with self.line:
                time.sleep(len(data) / SLOW_BYTES)
                SlowHandler.sent += len(data)
            outputfile.write(data)
        super().copyfile(source, outputfile)


def test_python_starts_on_any_line(new_context: Callable[..., Any]) -> None:
    """After a Stop and a reload; nothing comes twice over the line."""
    size = json.loads((SITE / "pyodide/parts.json").read_text())["bytes"]
    assert size < 5_500_000
    for address in serve(SITE, SlowHandler):
        page = new_context(base_url=address).new_page()
        page.goto("book/lessons/1-keys.html")
        example = page.locator("[data-name=first-message]")
        press(example, "Run")
        example.get_by_text("loading: 1.").wait_for(timeout=PLAY_MS)
        press(example, "Stop")
        assert outcome(example) == ("bad", "Stopped.")
        press(example, "Run")
        example.get_by_text("loading: 2.").wait_for(timeout=PLAY_MS)
        page.reload()
        press(example, "Run")
        said = example.locator("output")
        said.and_(page.locator(".good")).wait_for(timeout=PLAY_MS)
        assert SlowHandler.sent < size + 6 * PART_BYTES
        page.context.close()


# ---- The playground, orders, surprises and mistakes


@pytest.fixture
def bench(page: Any) -> Any:
    """An empty playground."""
    page.goto("book/bench.html#text=")
    outcome(page.locator("#bench"))
    return page.locator("#bench")


def do(bench: Any, *names: str) -> tuple[str, str]:
    """Press buttons; wait after each for what it leads to."""
    for name in names:
        bench.evaluate("one => one.querySelector('output').className = ''")
        press(bench, name)
        outcome(bench)
    return outcome(bench)


def conversation(bench: Any) -> list[str]:
    """Return the conversation, once it has been played."""
    outcome(bench)
    return str(bench.locator("textarea").input_value()).splitlines()


def test_a_line_that_fails_stops_nothing(bench: Any) -> None:
    """It can be undone, and what follows is played."""
    failed, later = map(bench.locator, (".failed", ".later"))
    assert do(bench, "Read one")[0] == "bad"
    assert do(bench, "Send")[0] == "good"
    assert failed.count() == 1 and not later.count()
    do(bench, "Undo", "Undo")
    assert conversation(bench) == []
    bench.locator("[name=packet]").fill("MSG a/b hello")
    verdict, said = do(bench, "Send")
    assert verdict == "bad" and "no NUL byte after the key" in said
    bench.get_by_label("Time").press("ArrowLeft")
    assert later.count() == 1


def test_the_keyboard_is_enough_to_play(bench: Any) -> None:
    """To send, to choose another client, and to go back."""
    page, keys = bench.page, bench.page.keyboard

    def send(packet: str) -> None:
        keys.press("Control+A")
        keys.type(packet)
        keys.press("Escape")  # the list of suggestions
        keys.press("Enter")

    tab_to(page, "name === 'packet'")
    send("SUB k")
    page.wait_for_function(SUBSCRIBED)
    keys.press("Shift+Tab")
    keys.type("B")
    keys.press("Tab")
    send(r"MSG k\0hello")
    page.wait_for_selector(r"text=/in the kernel\s+1/")
    assert conversation(bench) == ["A > SUB k", r"B > MSG k\0hello"]
    page.go_back()
    page.wait_for_function(SUBSCRIBED)


def test_the_address_is_the_state(bench: Any, fresh: Any) -> None:
    """Somebody else who opens it sees the same."""
    for name in ("Connect as", "Give it room", "Wait", "Read one"):
        do(bench, name)
    before = conversation(bench)
    assert before == ["A process uid=1", "A room 1", "wait 1", "A < {any}"]
    fresh.goto(bench.page.url)
    assert conversation(fresh.locator("#bench")) == before


def test_it_tries_every_order(page: Any) -> None:
    """It says which bound is exceeded."""
    page.goto("book/bench.html#" + urlencode({"text": LONG + "A close"}))
    outcome(page.locator("#bench"))
    press(page, "Try every order")
    said = page.get_by_text("A has 7: put a line --- after")
    said.wait_for(timeout=PLAY_MS)


SUBSCRIBED = "bench.elements.text.value == 'A > SUB k'"
PUBLISH = "".join(f"{name} > MSG k\\0{{1..6}}\n" for name in "BC")
LONG = "A > SUB k\n" + "A < {any}\n" * 5 + PUBLISH  # it takes some seconds


def test_a_lesson_tries_every_order(sized: Any) -> None:
    """It finds what the book had printed, and the server plays it."""
    sized.goto("book/lessons/6-waiting.html")
    count = sized.locator("[data-name=too-late] .ends p").first
    printed = count.text_content()
    ends = try_orders(sized, "too-late")
    assert count.text_content() == printed
    assert printed == "Orders: 4. End states: 3." and ends.count() == 3
    for end in ends.all():
        press(end, re.compile("^Run "))
        assert outcome(end)[0] == "good"


def test_a_surprise_is_predicted(sized: Any) -> None:
    """Its address is all of it; the rules that decided are named."""
    sized.goto("book/surprise.html")
    sized.wait_for_selector("#surprise .lanes", timeout=PLAY_MS)
    before = sized.locator(".drawing").inner_text()
    press(sized, "Surprise me")
    sized.wait_for_url("**#chapter=2&seed=*")
    sized.goto("book/surprise.html#chapter=2&seed=1")
    sized.wait_for_function(
        "(text) => document.querySelector('.drawing').innerText === text",
        arg=before,
    )
    assert "receives" not in before
    surprise = sized.locator("#surprise")
    press(sized, "Play it")
    assert "receives" not in outcome(surprise)[1]
    for hint in ("These rules decided: [", re.compile("t: [A-Z] receives")):
        press(sized, "Play it")
        sized.get_by_text(hint).wait_for()
    said = outcome(surprise)[1]
    for name, heard in re.findall(r"(\w) receives ([\d ]+)", said):
        sized.get_by_label(f"{name} receives").fill(heard)
    press(sized, "Play it")
    sized.get_by_text("Right, all of it.").wait_for()


def test_a_reader_catches_a_mistake(sized: Any) -> None:
    """By one of three conversations, or by the kit, which names the rule."""
    sized.goto("book/mistakes.html")
    sections = sized.locator("section > section")
    names = sections.evaluate_all("all => all.map((one) => one.id)")
    assert len(names) == len({*names}) >= 12
    sized.evaluate("localStorage.clear()")  # it was caught in another width
    sized.reload()
    server = sized.locator(f"section#{names[0]}")
    status = server.get_by_role("status").first
    answer = server.locator(".answer")
    for example in server.locator(".example").all():
        example.locator("summary").click()
        press(example, "Run")
        if outcome(example)[0] == "bad":
            break
        assert "Not this one" in status.inner_text()
        assert not answer.is_visible()
    assert "It breaks [MATCH-2]." in status.inner_text()
    assert answer.is_visible()
    sized.reload()
    assert "You have caught this one." in status.inner_text()

    server = sized.locator(f"section#{names[3]}")
    press(server, "Let the kit look")
    server.get_by_text("The kit has caught it. It breaks").wait_for()
    assert server.locator("form.mistake .failed").count() == 1


# ---- Without a server or Python, and what is found


def test_without_a_server(fresh: Any) -> None:
    """A page that is a file is for reading, and says so."""
    fresh.goto((SITE / "book/bench.html").as_uri())
    verdict, said = outcome(fresh.locator("#bench"))
    assert verdict == "bad" and "from a web server" in said


def test_without_pyodide(fresh: Any, tmp_path: Path) -> None:
    """A book that was made without a network says so."""
    for folder in ("_static", "book"):
        shutil.copytree(SITE / folder, tmp_path / folder)
    for address in serve(tmp_path):
        fresh.goto(f"{address}book/bench.html")
        verdict, said = outcome(fresh.locator("#bench"))
        assert verdict == "bad" and "without Pyodide" in said


SEARCHES = {  # what is typed, and the page that answers it
    "BLOCK-13": "spec/5-flood-control.html#BLOCK-13",
    "match-6": "spec/2-routing-keys.html#MATCH-6",
    "wildcard": "book/lessons/1-keys.html",
    "deadlock": "book/lessons/6-waiting.html",
    "permission denied": "book/questions.html",
    "retain": "book/questions.html",
    "lose messages": "book/questions.html",
    "MSG": "book/packets/msg.html",
}


@pytest.mark.parametrize("words", SEARCHES)
def test_the_first_result_answers(page: Any, words: str) -> None:
    """Without a network."""
    page.goto("search.html?" + urlencode({"q": words}))
    page.wait_for_selector(".search-summary")
    first = page.locator("ul.search li a").first.get_attribute("href")
    wanted, _, anchor = SEARCHES[words].partition("#")
    assert first.partition("#")[0].partition("?")[0] == wanted
    assert first.endswith(anchor)


def test_all_rules_are_found() -> None:
    """By their ids."""
    index = (SITE / "searchindex.js").read_text("utf-8")
    entries = json.loads(index[index.index("{") : -1])["indexentries"]
    assert {rule.lower() for rule in read_rules()} <= {*entries}


def test_titles_are_unique() -> None:
    """So that tabs and results can be told apart."""
    titles = [
        re.search("<title>(.*)</title>", text)[1]  # type: ignore[index]
        for name, text in PAGES.items()
        if name not in ("index.html", "book/report.html")
    ]
    assert sorted({*titles}) == sorted(titles)
