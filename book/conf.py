"""How Sphinx makes the book: make book."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "sbus"
html_title = "sbus, the book"
extensions = ["myst_parser", "sbus_book"]
include_patterns = ["spec/**.md", "book/**.md"]
exclude_patterns = ["book/README.md", "book/site", "build", ".*"]
root_doc = "book/index"
highlight_language = "none"
myst_heading_anchors = 4
myst_fence_as_directive = "match packet conversation client question".split()
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["book.css"]
html_js_files = ["book.js"]
html_show_copyright = html_copy_source = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "github-dark"
myst_enable_extensions = ["deflist"]
