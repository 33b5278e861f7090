"""How Sphinx makes the book: make book."""

from sbus_book import figures

project, html_title, root_doc = "sbus", "sbus, the book", "book/index"
extensions = ["myst_parser", "sbus_book", "stage_pages"]
include_patterns = ["spec/**.md", "book/**.md"]
exclude_patterns = ["book/README.md", "book/site", "build", ".*"]
highlight_language = "none"
myst_heading_anchors = 4
myst_enable_extensions = ["substitution"]
myst_substitutions = figures()
myst_fence_as_directive = ["match", "packet", "conversation", "client"]
myst_fence_as_directive += ["question", "orders", "picture"]
html_theme = "furo"
html_static_path, html_copy_source = ["static"], False
html_css_files = ["book.css"]
html_js_files = ["work.js", "book.js", "stage.js", "gallery.js"]
html_show_copyright = html_use_index = False
html_logo = html_favicon = "static/sbus.svg"
suppress_warnings = ["toc.not_included"]  # what leads to such pages are links
smartquotes = False  # quotes in rules are bytes
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "github-dark"
