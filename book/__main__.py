"""Writes the book to book/site: python -m book [DIRECTORY]"""

from __future__ import annotations

import shutil
import sys
import zipfile
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import jinja2
import markupsafe
from markupsafe import Markup

from conformance.rules import SPEC, examples_of
from traceability import ROOT

from .chapters import LISTINGS, TEXTS, to_html
from .drawing import page_of, render

BOOK = ROOT / "book"
PLAYED = [  # what the player needs: from where, what
    (ROOT, "sbus.py"),
    (ROOT, "book/[_dp]*.py"),
    (ROOT, "book/templates/*.html"),
    (ROOT / "spec", "*.md"),
    (ROOT / "spec", "examples/*.md"),
    (ROOT / "spec", "conformance/*.py"),
    (ROOT / "tests/bed", "fake_*.py"),
    (ROOT / "tests/bed", "packets.py"),
    (Path(jinja2.__path__[0]).parent, "jinja2/*.py"),
    (Path(markupsafe.__path__[0]).parent, "markupsafe/*.py"),
]


class Page(NamedTuple):
    """A page before it has its frame."""

    file: str
    title: str
    body: Markup


def text_page(file: str, path: Path) -> Page:
    """Return the page of a Markdown file, and of its examples, if any."""
    files = filter(Path.exists, (path, examples_of(path)))
    source = "\n".join(file.read_text("utf-8") for file in files)
    title = source.partition("\n")[0].lstrip("# ")
    return Page(page_of(file), title, to_html(source))


def parts() -> dict[str, list[Page]]:
    """Return all pages but the first, in the order of reading, by part."""
    lessons = sorted((BOOK / "lessons").glob("*.md"))
    return {
        "Lessons and the bench": [
            *(text_page(f"lesson-{path.name}", path) for path in lessons),
            Page("bench.html", "The bench", render("bench")),
        ],
        "The specification": [
            text_page("specification.md", SPEC / "README.md"),
            *(text_page(path.name, path) for path in TEXTS),
            text_page("results.md", BOOK / "results.md"),
        ],
        "The source": [
            Page(one.page, one.title, render("section", one=one, of=listing))
            for listing in LISTINGS
            for one in listing.sections
        ],
    }


def build(site: Path) -> list[Path]:
    """Write the site; return its pages."""
    site.mkdir(parents=True, exist_ok=True)
    others = parts()
    pages = [
        text_page("index.md", BOOK / "index.md"),
        *chain(*others.values()),
    ]
    for number, page in enumerate(pages):
        html = render("frame", pages=pages, number=number, parts=others)
        (site / page.file).write_text(html, "utf-8")
    if not (site / "report.html").exists():  # until make book-results
        shutil.copy(site / "results.html", site / "report.html")
    shutil.copytree(BOOK / "static", site, dirs_exist_ok=True)
    with zipfile.ZipFile(site / "player.zip", "w") as archive:
        for root, files in PLAYED:
            for path in root.glob(files):
                archive.write(path, path.relative_to(root))
    return [site / page.file for page in pages]


if __name__ == "__main__":
    site = Path(*sys.argv[1:]) if sys.argv[1:] else BOOK / "site"
    print(f"{len(build(site))} pages are in {site}")
    if not (site / "pyodide").exists():
        print("They can be read; make book fetches pyodide, which runs them.")
