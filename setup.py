"""Has the pages written that a package contains; see pyproject.toml."""

import os
import subprocess
import sys

from setuptools import setup

WRITERS = ("contrib/man/manual.py", "dev/traceability.py trace")

for words in map(str.split, WRITERS):
    subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": "spec"},
        check=True,
    )

setup()
