"""Packs Python for the pages: what they need of Pyodide, in small parts.

    python3 book/pack_python.py PYODIDE.tgz FOLDER

A browser keeps each part, so what has come over a slow line is never fetched
again.  A student's program can import what is left of the standard library.
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

PART_BYTES = 1 << 17  # some seconds of a slow line
PACKED = ["pyodide.asm.wasm", "pyodide.asm.mjs", "python_stdlib.zip"]
PLAIN = ["pyodide.mjs", "package.json", "README.md"]
# No page needs the network, mail, other processes or terminals, nor tables of
# other encodings than Python's own
LEFT_OUT = re.compile(
    r"(email|ftplib|http|imaplib|mailbox|poplib|smtplib|socketserver|sqlite3"
    r"|urllib|wsgiref|xml|xmlrpc|plistlib|webbrowser|multiprocessing|_pyrepl"
    r"|pdb|doctest|pydoc|pydoc_data|tarfile|_pyio|pickletools|optparse|profile"
    r"|pstats|modulefinder|curses|_sysconfigdata\w*)(\.py|/)"
    r"|encodings/(?!cp437|cp1252|iso8859_1\.)(cp|iso|mac|koi|euc|shift|big5|gb"
    r"|hz|johab|kz|ptcp|hp|tis|palmos)"
)


def trimmed(library: bytes) -> bytes:
    """Return the standard library, as a zip, without what no page needs."""
    kept = io.BytesIO()
    old = zipfile.ZipFile(io.BytesIO(library))
    with zipfile.ZipFile(kept, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            if not LEFT_OUT.match(name):
                new.writestr(name, old.read(name))
    return kept.getvalue()


def pack(package: Path, folder: Path) -> None:
    """Write the parts, and parts.json: how many there are of each file."""
    with tarfile.open(package) as tar:
        files = {
            Path(member.name).name: tar.extractfile(member).read()  # type: ignore[union-attr]
            for member in tar.getmembers()
        }
    for name in PLAIN:
        (folder / name).write_bytes(files[name])
    files["python_stdlib.zip"] = trimmed(files["python_stdlib.zip"])

    counts, size = {}, 0
    for name in PACKED:
        data = gzip.compress(files[name])
        starts = range(0, len(data), PART_BYTES)
        for number, start in enumerate(starts):
            part = data[start : start + PART_BYTES]
            (folder / f"{name}.gz.{number}").write_bytes(part)
        counts[name] = len(starts)
        size += len(data)

    # No package of Pyodide is ever loaded
    lock = json.loads(files["pyodide-lock.json"]) | {"packages": {}}
    parts = {"parts": counts, "bytes": size, "lock": json.dumps(lock)}
    (folder / "parts.json").write_text(json.dumps(parts))


if __name__ == "__main__":
    pack(*map(Path, sys.argv[1:]))
