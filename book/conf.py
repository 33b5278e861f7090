"""How Sphinx makes the book: make book."""

project, html_title, root_doc = "sbus", "sbus, the book", "book/index"
extensions = ["myst_parser", "sbus_book"]
include_patterns = ["spec/**.md", "book/**.md"]
exclude_patterns = ["book/README.md", "book/site", "build", ".*"]
highlight_language = "none"
myst_heading_anchors = 4
myst_fence_as_directive = ["match", "packet", "conversation", "client"]
myst_fence_as_directive += ["question", "picture"]
html_theme = "furo"
html_static_path, html_copy_source = ["static"], False
html_css_files, html_js_files = ["book.css"], ["book.js"]
html_show_copyright = False
html_logo = html_favicon = "static/sbus.svg"
smartquotes = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "github-dark"
