"""Packs Python for the pages: what they need of Pyodide, in small parts.

    python3 book/pack_python.py PYODIDE.tgz FOLDER

A browser keeps each part, so what has come over a slow line is never fetched
again.  A program in a page can import what is left of the standard library.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

PART_BYTES = 1 << 18
PACKED = ["pyodide.asm.wasm", "pyodide.asm.mjs", "python_stdlib.zip"]
PLAIN = ["pyodide.mjs", "package.json", "README.md"]
# No page needs these: the network, mail, other processes, terminals
LEFT_OUT = """
    email ftplib http imaplib mailbox poplib smtplib socketserver sqlite3
    urllib wsgiref xml xmlrpc plistlib webbrowser multiprocessing _pyrepl pdb
    doctest pydoc pydoc_data tarfile _pyio pickletools optparse profile pstats
    modulefinder curses _sysconfigdata__emscripten_wasm32-emscripten
"""
TABLES = re.compile(  # of bytes in other encodings than Python's own
    "encodings/(?!cp437|cp1252|iso8859_1[.])"
    "(cp|iso|mac|koi|euc|shift|big5|gb|hz|johab|kz|ptcp|hp|tis|palmos)"
)


def trimmed(archive: bytes) -> bytes:
    """Return the standard library without what no page needs."""
    kept = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(archive)) as old,
        zipfile.ZipFile(
            kept, "w", zipfile.ZIP_DEFLATED, compresslevel=9
        ) as new,
    ):
        for info in old.infolist():
            top = info.filename.partition("/")[0].removesuffix(".py")
            if top not in LEFT_OUT.split() and not TABLES.match(info.filename):
                new.writestr(info.filename, old.read(info))
    return kept.getvalue()


def pack(package: Path, folder: Path) -> None:
    """Write the parts, and parts.json: how many there are of each file."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(package) as tar:
        files = {m.name.partition("/")[2]: m for m in tar.getmembers()}
        read = {k: tar.extractfile(m).read() for k, m in files.items()}  # type: ignore[union-attr]
    for name in PLAIN:
        (folder / name).write_bytes(read[name])
    lock = json.loads(read["pyodide-lock.json"]) | {"packages": {}}
    told: dict[str, Any] = {"parts": {}, "bytes": 0, "lock": json.dumps(lock)}
    for name in PACKED:
        data = read[name]
        data = trimmed(data) if name[-4:] == ".zip" else data
        data = gzip.compress(data, 9, mtime=0)
        told["bytes"] += len(data)
        starts = range(0, len(data), PART_BYTES)
        told["parts"][name] = len(starts)
        for number, start in enumerate(starts):
            part = data[start : start + PART_BYTES]
            (folder / f"{name}.gz.{number}").write_bytes(part)
    (folder / "parts.json").write_text(json.dumps(told))


if __name__ == "__main__":
    pack(*map(Path, sys.argv[1:]))
