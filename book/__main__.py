"""Writes the book to book/site: python -m book [DIRECTORY]"""

from __future__ import annotations

import shutil
import sys
import zipfile
from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from conformance.rules import SPEC
from traceability import ROOT

from .chapters import TEXTS, listings, to_html
from .drawing import page_of

BOOK = ROOT / "book"
PLAYED = [  # what the player needs
    "sbus.py",
    "spec/*.md",
    "spec/conformance/*.py",
    "tests/bed/fake_*.py",
    "tests/bed/packets.py",
    "book/__init__.py",
    "book/drawing.py",
    "book/player.py",
]


class Page(NamedTuple):
    """A page before it has its frame."""

    part: str  # of the book
    file: str
    title: str
    body: str


def text_page(part: str, file: str, path: Path) -> Page:
    """Return the page of a Markdown file."""
    source = path.read_text("utf-8")
    title = source.partition("\n")[0].lstrip("# ")
    return Page(part, page_of(file), title, to_html(source))


def pages() -> Iterator[Page]:
    """Return all pages but the first, in the order of reading."""
    for path in sorted((BOOK / "lessons").glob("*.md")):
        yield text_page("Lessons and the bench", f"lesson-{path.name}", path)
    bench = (BOOK / "static/bench.html").read_text("utf-8")
    yield Page("Lessons and the bench", "bench.html", "The bench", bench)
    yield text_page(
        "The specification", "specification.md", SPEC / "README.md"
    )
    for path in (*TEXTS, BOOK / "results.md"):
        yield text_page("The specification", path.name, path)
    for listing in listings():
        for section in listing.sections:
            html = listing.page(section)
            yield Page("The source", section.page, section.title, html)


def contents(others: list[Page]) -> str:
    """Return the table of contents."""
    html = ""
    for part, of_part in groupby(others, lambda page: page.part):
        items = "".join(
            f'<li><a href="{page.file}">{escape(page.title)}</a></li>'
            for page in of_part
        )
        html += f"<section><h2>{part}</h2><ul>{items}</ul></section>"
    return f'<div class="contents">{html}</div>'


def framed(page: Page, before: Page | None, after: Page | None) -> str:
    """Return a whole page."""
    html = (BOOK / "static/frame.html").read_text("utf-8")
    ways = "".join(
        f'<a href="{other.file}">{arrow} {escape(other.title)}</a>'
        for arrow, other in (("←", before), ("→", after))
        if other
    )
    html = html.replace("{{title}}", escape(page.title))
    return html.replace("{{ways}}", ways).replace("{{body}}", page.body)


def build(site: Path) -> list[Path]:
    """Write the site; return its pages."""
    site.mkdir(parents=True, exist_ok=True)
    others = list(pages())
    first = text_page("", "index.md", BOOK / "index.md")
    first = first._replace(body=first.body + contents(others))
    whole = [first, *others]
    for before, page, after in zip([None, *whole], whole, [*others, None]):
        html = framed(page, before, after)
        (site / page.file).write_text(html, "utf-8")
    if not (site / "report.html").exists():  # until make book-results
        shutil.copy(site / "results.html", site / "report.html")
    for name in ("style.css", "page.js", "worker.js"):
        shutil.copy(BOOK / "static" / name, site)
    with zipfile.ZipFile(site / "player.zip", "w") as archive:
        for path in (path for one in PLAYED for path in ROOT.glob(one)):
            archive.write(path, path.relative_to(ROOT))
    return [site / page.file for page in whole]


if __name__ == "__main__":
    site = Path(*sys.argv[1:]) if sys.argv[1:] else BOOK / "site"
    print(f"{len(build(site))} pages are in {site}")
