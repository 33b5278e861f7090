"""How Sphinx makes the book: make book."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

project = "sbus"
html_title = "sbus, the book"
extensions = ["myst_parser", "sbus_book"]
include_patterns = ["spec/**.md", "book/**.md"]
exclude_patterns = ["book/README.md", "book/site"]
root_doc = "book/index"
highlight_language = "none"
myst_heading_anchors = 4
myst_fence_as_directive = [
    "match", "packet", "conversation", "client", "question",
]  # fmt: skip
html_theme = "furo"
html_static_path = [str(HERE / "static")]
html_css_files = ["book.css"]
html_js_files = ["book.js"]
html_show_sourcelink = html_copy_source = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
