"""Tests of the files themselves: sections, citations, imports."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from processes import ROOT

TESTS = [ROOT / "test_sbus.py", *ROOT.glob("tests/**/test_*.py")]
FOLDERS = [  # the parts of the repository, as tests/README.md lists them
    "sbus.py",
    "sbus_client.py",
    "tools",
    "spec",
    "bench",
    "book",
    "pipeline",
    "test_sbus.py",
    "tests",
]
PYTHON = [
    file
    for folder in FOLDERS
    for file in (
        [ROOT / folder]
        if folder.endswith(".py")
        else ROOT.glob(f"{folder}/**/*.py")
    )
]
FOLDERS_OF = {file: file.relative_to(ROOT).parts[0] for file in PYTHON}
MADE = ("build", "dist", "htmlcov", "__pycache__", "sbus.egg-info")


class TestFiles:
    """What sbus.py and spec/ promise about themselves."""

    SOURCE = (ROOT / "sbus.py").read_text("utf-8")
    CHAPTERS = sorted((ROOT / "spec").glob("[1-9]-*.md"))
    RULE = re.compile(
        r"^\*\*\[([A-Z]+-\d+)\]\*\* (.+?)$(?=\n\n|\n*\Z)", re.M | re.S
    )

    def sections(self) -> list[tuple[str, str]]:
        """Return the title and the text of each section of sbus.py."""
        banner = re.compile(r"^# =+\n# (\d\. .+)\n", re.M)
        parts = banner.split(self.SOURCE)
        return list(zip(parts[1::2], parts[2::2]))

    def rules(self) -> list[tuple[str, str]]:
        """Return the id and the sentence of each rule."""
        return [
            (match[1], " ".join(match[2].split()))
            for chapter in self.CHAPTERS
            for match in self.RULE.finditer(chapter.read_text("utf-8"))
        ]

    def test_sections_are_the_chapters(self) -> None:
        """Each section carries the title of its chapter and its file name."""
        titles = []
        for title, _ in self.sections():
            name, file = title.rsplit(None, 1)
            heading = (ROOT / file).read_text("utf-8").splitlines()[0]
            assert heading == f"# {name}"
            titles.append(ROOT / file)
        assert titles == self.CHAPTERS

    def test_the_core_does_no_io(self) -> None:
        """Sections 1 to 7 name none of the modules that do I/O."""
        core = "\n".join(text for _, text in self.sections()[:7])
        named = {
            node.id
            for node in ast.walk(ast.parse(core))
            if isinstance(node, ast.Name)
        }
        assert "pattern_for" in named
        assert not named & {"socket", "selectors", "os", "time", "select"}

    def test_only_the_standard_library_is_imported(self) -> None:
        """sbus.py runs where there is nothing but Python."""
        imported = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(self.SOURCE))
            for name in imported_by(node)
        }
        assert "selectors" in imported
        if sys.version_info >= (3, 10):
            assert imported <= sys.stdlib_module_names

    def test_truncating_recv_is_not_used(self) -> None:
        """recv with MSG_TRUNC returns bytes that nobody sent."""
        assert not re.search(r"\.recv\([^)]*MSG_TRUNC", self.SOURCE)

    def test_rules_have_one_id_a_level_and_an_origin(self) -> None:
        """A rule is one sentence, and no id is defined twice."""
        ids = [rule for rule, _ in self.rules()]
        assert len(ids) > 90
        assert len(ids) == len(set(ids))
        for rule, sentence in self.rules():
            assert re.search(r"\b(MUST|SHOULD|MAY)\b", sentence), rule
            assert re.search(r"\. \((upstream|ours)\)$", sentence), rule

    def test_ids_have_no_gaps(self) -> None:
        """Ids of a family are numbered from 1."""
        families: dict[str, list[int]] = {}
        for rule, _ in self.rules():
            family, number = rule.rsplit("-", 1)
            families.setdefault(family, []).append(int(number))
        for family, numbers in families.items():
            assert sorted(numbers) == list(range(1, len(numbers) + 1)), family

    @pytest.mark.parametrize(
        "file",
        [
            *sorted(PYTHON),
            *sorted(ROOT.glob("spec/*.md")),
            ROOT / "README.md",
            ROOT / "SECURITY.md",
        ],
        ids=lambda path: path.name,
    )
    def test_cited_ids_exist(self, file: Path) -> None:
        """Every id in brackets is that of a rule."""
        defined = {rule for rule, _ in self.rules()}
        cited = re.findall(r"\[([A-Z]+-\d+)\]", file.read_text("utf-8"))
        assert set(cited) <= defined

    def test_named_tests_exist(self) -> None:
        """What SECURITY.md says to be tested is tested there."""
        text = (ROOT / "SECURITY.md").read_text("utf-8")
        tests = "".join(path.read_text("utf-8") for path in TESTS)
        named = re.findall(r"`([Tt]est_?[A-Z_a-z]+)`", text)
        assert len(named) > 20
        for name in named:
            assert re.search(rf"(class|def) {name}\b", tests), name

    def test_every_server_rule_is_cited_by_the_server_and_a_test(self) -> None:
        """What the specification asks for can be found in code and tests."""
        server = self.SOURCE
        client = (ROOT / "sbus_client.py").read_text("utf-8")
        tests = "".join(path.read_text("utf-8") for path in TESTS)
        missing = []
        for rule, sentence in self.rules():
            code = client if sentence.startswith("A client") else server
            by_users = {"KEY-2", "KEY-6"}  # of any client
            is_cited = re.search(rf'[\["]{rule}["\]]', code)
            if not is_cited and rule not in by_users:
                missing.append(f"{rule} in code")
            if f"[{rule}]" not in tests and rule not in by_users:
                missing.append(f"{rule} in tests")
        assert not missing


def imported_by(node: ast.AST) -> list[str]:
    """Return the names of the modules that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return []


class TestLayout:
    """What tests/README.md says of the folders."""

    README = (ROOT / "tests/README.md").read_text("utf-8")

    def folder_of(self, module: str, beside: Path) -> str | None:
        """Return the part of the repository that a module is in."""
        name = module.partition(".")[0]
        neighbour = beside.parent / f"{name}.py"
        if not name or neighbour in FOLDERS_OF:
            return FOLDERS_OF[neighbour if name else beside]
        for file, folder in FOLDERS_OF.items():
            if name in (file.stem, file.parent.name):
                return folder
        return None

    def test_imports_go_one_way(self) -> None:
        """A part imports only those that its row names."""
        rows = re.findall(r"^\| `([\w./]+)` \| (.*?) \|", self.README, re.M)
        assert [folder for folder, _ in rows] == FOLDERS
        allowed = {
            folder: {folder, *re.findall(r"`([\w./]+)`", others)}
            for folder, others in rows
        }
        for file, folder in FOLDERS_OF.items():
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                for module in imported_by(node):
                    target = self.folder_of(module, file)
                    assert target is None or target in allowed[folder], file
                    assert not module.startswith("test_"), file
                if isinstance(node, ast.ImportFrom) and not node.level:
                    private = [n for n in node.names if n.name[0] == "_"]
                    assert not private, file

    def test_files_are_short(self) -> None:
        """Whoever opens one can read it; the two drop-in files are whole."""
        for file in PYTHON:
            lines = file.read_text("utf-8").count("\n")
            limit = 1_000 if file in TESTS else 1_500
            is_whole = file.name in ("sbus.py", "sbus_client.py")
            assert lines <= limit or is_whole, file

    def test_folders_say_what_they_are_for(self) -> None:
        """In a README, or in the docstring of a package."""
        for folder in (f for f in ROOT.iterdir() if f.is_dir()):
            if folder.name[0] == "." or folder.name in MADE:
                continue
            says = [folder / "README.md", folder / "__init__.py"]
            assert any(file.exists() for file in says), folder
