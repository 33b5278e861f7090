"""Stands in for the client where Python is given a single file of this folder.

Then Python looks for modules in this folder first, and would find no client.
"""

raise SystemExit("sbus: run the folder, not a file: python3 tools COMMAND")
