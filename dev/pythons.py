"""Runs the tests of the two drop-in files on each CPython of this machine.

    make pythons                   on each from 3.9
    make pythons ARGS="3.9 3.13"   on these, of which none may be missing

It looks for them on PATH and among those of pyenv.  Each gets pytest in a
folder of its own below build/, which is fetched once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = [f"3.{minor}" for minor in range(9, 16)]
TESTS = ["test_sbus.py", "tests/server", "tests/client"]
PACKAGES = ["pytest", "pytest-timeout"]
WHO = "import sys; print(sys.implementation.name, *sys.version_info[:2])"


def find(version: str) -> str | None:
    """Return the path of a CPython of a version, if there is one."""
    root = os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv"
    installed = sorted(Path(root).glob(f"versions/{version}.*/bin"))
    for folder in (*os.get_exec_path(), *installed):
        path = shutil.which(f"python{version}", path=str(folder))
        if path and is_cpython(path, version):
            return path
    return None


def is_cpython(path: str, version: str) -> bool:
    """Return whether a program is what its name says.

    That of pyenv may be there for a version that is not.
    """
    answer = subprocess.run([path, "-c", WHO], capture_output=True, text=True)
    return answer.stdout.split() == ["cpython", *version.split(".")]


def environment(version: str, path: str) -> str:
    """Return the path of a Python that has pytest, made of another."""
    folder = ROOT / "build/pythons" / version
    python, ready = str(folder / "bin/python"), folder / "ready"
    if not ready.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([path, "-m", "venv", str(folder)], check=True)
        pip = [python, "-m", "pip", "install", "-q", *PACKAGES]
        subprocess.run(pip, check=True)
        ready.touch()
    return python


def passes(version: str, path: str) -> bool:
    """Run the tests on a CPython; return whether they pass."""
    print(f"==== {version}: {path}", flush=True)
    try:
        python = environment(version, path)
    except subprocess.CalledProcessError:
        return False
    command = [python, "-m", "pytest", "-q", *TESTS]
    return subprocess.run(command, cwd=ROOT).returncode == 0


def main() -> int:
    """Run the tests; return 1 if they fail, or a wanted Python is missing."""
    wanted = sys.argv[1:]
    paths = {version: find(version) for version in wanted or VERSIONS}
    results = {
        version: "passed" if passes(version, path) else "FAILED"
        for version, path in paths.items()
        if path
    }
    for version in paths:
        print(version, results.get(version, "is not on this machine"))

    if not results or "FAILED" in results.values():
        return 1
    return 1 if wanted and len(results) < len(wanted) else 0


if __name__ == "__main__":
    sys.exit(main())
