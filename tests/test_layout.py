"""Tests of the files: who imports whom, and how long a drop-in file may be."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sbus
import sbus_client
from conformance.rules import SPECIFICATION
from measure import CODE, code_line_count, code_lines
from processes import ROOT

DROP_IN = ["sbus.py", "sbus_client.py"]
README = (ROOT / "tests/README.md").read_text("utf-8")
ROW = re.compile(r"^\| `([\w./]+)` \| (.*?) \|", re.M)
# The parts of the repository, and which of them each may import
PARTS: dict[str, set[str]] = {
    part: {part, *re.findall(r"`([\w./]+)`", others)}
    for part, others in ROW.findall(README)
}
PART_OF: dict[Path, str] = {
    file: part
    for part in PARTS
    for file in (
        [ROOT / part] if part[-3:] == ".py" else ROOT.glob(f"{part}/**/*.py")
    )
    if ROOT / "book/site" not in file.parents  # copies that `make book` made
}


def modules_imported_by(file: Path) -> set[str]:
    """Return the names of the modules that a file imports."""
    modules = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            modules.add("." * node.level + (node.module or ""))
    return modules


def part_of(module: str, importer: Path) -> str | None:
    """Return the part of the repository that a module is in, if it is."""
    name = module.partition(".")[0]
    if not name:  # a relative import
        return PART_OF[importer]
    beside = importer.parent / f"{name}.py"
    if beside in PART_OF:
        return PART_OF[beside]
    named = (file for file in PART_OF if name in (file.stem, file.parent.name))
    return next(map(PART_OF.__getitem__, named), None)


def test_imports_go_one_way() -> None:
    """A part imports only those that its row names, and no test."""
    for file, part in PART_OF.items():
        for module in modules_imported_by(file):
            assert part_of(module, file) in {None, *PARTS[part]}, file
            assert not module.startswith("test_"), file


def test_all_tools_look_for_modules_in_the_same_folders() -> None:
    """pytest, mypy and ruff each have a list of their own."""
    tomllib = pytest.importorskip("tomllib")
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    tools = tomllib.loads(text)["tool"]
    folders = tools["pytest"]["ini_options"]["pythonpath"]
    assert tools["ruff"]["src"] == folders
    named = [f"$MYPY_CONFIG_FILE_DIR/{name}" for name in folders[1:]]
    assert tools["mypy"]["mypy_path"] == named


@pytest.mark.skipif(sys.version_info < (3, 10), reason="nobody knows it")
def test_only_the_standard_library_is_imported() -> None:
    """Both programs and the kit run where there is nothing but Python."""
    known = {*sys.stdlib_module_names, "", "conformance", "model"}
    kit = (ROOT / "spec").glob("**/*.py")
    for file in (*map(ROOT.joinpath, DROP_IN), *kit):
        names = {name.partition(".")[0] for name in modules_imported_by(file)}
        assert names <= known, file


def test_there_is_one_version() -> None:
    """A file to drop in has its own copy of it, and setup reads that."""
    assert sbus.__version__ == sbus_client.__version__
    copies = [
        file
        for file in PART_OF
        if "\n__version__ = " in file.read_text("utf-8")
    ]
    assert sorted(file.name for file in copies) == sorted(DROP_IN)
    setup = (ROOT / "pyproject.toml").read_text("utf-8")
    assert 'version = { attr = "sbus.__version__" }' in setup
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    newest = re.findall(r"^## (\d.*)$", changes, re.M)[0]
    assert newest.partition(" ")[0] == sbus.__version__


def test_there_is_one_number_of_the_specification() -> None:
    """It stands where readers look for it."""
    schema = json.loads((ROOT / "spec/vectors/schema.json").read_text("utf-8"))
    enumeration = schema["properties"]["specification"]["enum"]
    assert enumeration == [SPECIFICATION]
    for page in ("spec/README.md", "CHANGELOG.md"):
        assert SPECIFICATION in (ROOT / page).read_text("utf-8")


def test_goals_that_a_page_names_exist() -> None:
    """Also those that `make help` lists."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    rules = re.findall(r"^([\w./-]+(?: [\w./-]+)*):(?!=)", makefile, re.M)
    goals = {*" ".join(rules).split()}
    listed = re.findall(r"^# make ([\w./-]+)", makefile, re.M)
    assert {*listed} <= goals and len(listed) == len({*listed})

    folders = [ROOT.glob(f"{part}/**/*.md") for part in PARTS]
    for page in (*ROOT.glob("*.md"), *itertools.chain(*folders)):
        text = page.read_text("utf-8")
        named = re.findall(r"`make ([a-z][\w./-]*)", text)
        assert {*named} <= goals, page


def test_check_without_pytest() -> None:
    """It says once what is missing, and not for each group of tests."""
    make = ["make", "-s", "-C", str(ROOT), "check", "PYTHON=false"]
    done = subprocess.run(make, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("false has no pytest: install pytest") == 1
    assert "No module" not in done.stdout + done.stderr


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="it is a copy")
def test_the_source_distribution_is_complete() -> None:
    """Whatever git has, a packager gets."""
    command = ["git", "-C", str(ROOT), "ls-files"]
    files = subprocess.check_output(command, text=True).split()
    manifest = (ROOT / "MANIFEST.in").read_text("utf-8").split()
    by_setup = {"MANIFEST.in", "pyproject.toml", "setup.py", *DROP_IN}
    parts = {file.partition("/")[0] for file in files}
    assert parts <= {*manifest, *by_setup}


@pytest.mark.parametrize("name", DROP_IN)
def test_a_file_to_drop_in_is_short(name: str) -> None:
    """It is copied into other repositories, and read there."""
    count, limit = code_line_count(ROOT / name), CODE[name]
    assert count <= limit, f"{name}: {count} code lines of {limit}"


@pytest.mark.timeout(600)  # mypy without a cache, beside all other tests
@pytest.mark.parametrize(
    "words", ["ruff format --check --diff", "ruff check", "mypy --pretty"]
)
def test_all_python_is_clean(words: str) -> None:
    """If not: make lint.  pyproject.toml says what it is to look at."""
    tool = words.partition(" ")[0]
    pytest.importorskip(tool, reason=f"{tool} is not installed: extra lint")
    cache = {} if os.access(ROOT, os.W_OK) else {"MYPY_CACHE_DIR": os.devnull}
    done = subprocess.run(
        [sys.executable, "-m", *words.split()],
        cwd=ROOT,
        env={**os.environ, "RUFF_NO_CACHE": "true", **cache},
        capture_output=True,
        text=True,
    )
    if "Required version" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr


def test_code_lines_are_those_that_do_something() -> None:
    """Blank lines, comments and docstrings are free."""
    text = '"""A"""\n\nTEXT = """of\ntwo"""  # lines\n\ndef work():\n'
    text += '    """Works.\n\n    At length."""\n    # Now\n    return 1\n'
    assert code_lines(text) == {3, 4, 6, 11}
