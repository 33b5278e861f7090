"""The book: the specification, the server and runs of it, side by side."""
