"""Tests of the files themselves: sections, citations, imports."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from conformance.rules import SPEC, chapters, read_rules
from processes import ROOT

TESTS = [ROOT / "test_sbus.py", *ROOT.glob("tests/**/test_*.py")]
DROP_IN = [ROOT / "sbus.py", ROOT / "sbus_client.py"]  # whole programs
README = (ROOT / "tests/README.md").read_text("utf-8")
# The parts of the repository, and which of them each may import
PARTS: dict[str, set[str]] = {
    part: {part, *re.findall(r"`([\w./]+)`", others)}
    for part, others in re.findall(
        r"^\| `([\w./]+)` \| (.*?) \|", README, re.M
    )
}
PART_OF: dict[Path, str] = {
    file: part
    for part in PARTS
    for file in (
        [ROOT / part] if part[-3:] == ".py" else ROOT.glob(f"{part}/**/*.py")
    )
}
MADE = ("build", "dist", "htmlcov", "__pycache__", "sbus.egg-info")
PAGES = [*SPEC.glob("**/*.md"), ROOT / "README.md", ROOT / "SECURITY.md"]


def modules_imported_by(file: Path) -> set[str]:
    """Return the names of the modules that a file imports."""
    modules = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            modules.add("." * node.level + (node.module or ""))
            names = [one.name for one in node.names]
            private = [name for name in names if re.match("_[^_]", name)]
            assert node.level or not private, file
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


class TestServer:
    """What sbus.py promises about itself."""

    SOURCE = (ROOT / "sbus.py").read_text("utf-8")

    def sections(self) -> list[tuple[str, str]]:
        """Return the title and the text of each section."""
        parts = re.split(r"^# ==== (.+?) =+\n", self.SOURCE, flags=re.M)
        return list(zip(parts[1::2], parts[2::2]))

    def test_sections_are_the_chapters(self) -> None:
        """Each carries the title of its chapter."""
        heads = [
            one.read_text("utf-8").partition("\n")[0] for one in chapters()
        ]
        assert [f"# {title}" for title, _ in self.sections()] == heads

    def test_the_core_does_no_io(self) -> None:
        """Sections 2 to 6 name none of the modules that do I/O."""
        core = "\n".join(text for _, text in self.sections()[1:6])
        named = {
            node.id
            for node in ast.walk(ast.parse(core))
            if isinstance(node, ast.Name)
        }
        assert "Table" in named
        assert not named & {"socket", "selectors", "os", "time", "select"}

    def test_each_rule_is_cited_by_the_code_and_a_test(self) -> None:
        """What the specification asks for can be found in both."""
        server, client = (file.read_text("utf-8") for file in DROP_IN)
        tests = "".join(path.read_text("utf-8") for path in TESTS)
        missing = []
        for rule in read_rules().values():
            code = client if rule.subject == "client" else server
            if rule.id not in ("KEY-2", "KEY-6"):  # kept by programs
                if not re.search(rf'[\["]{rule.id}["\]]', code):
                    missing.append(f"{rule.id} in code")
                if f"[{rule.id}]" not in tests:
                    missing.append(f"{rule.id} in tests")
        assert not missing


class TestLayout:
    """What tests/README.md says of the folders."""

    def test_imports_go_one_way(self) -> None:
        """A part imports only those that its row names, and no test."""
        for file, part in PART_OF.items():
            for module in modules_imported_by(file):
                assert part_of(module, file) in {None, *PARTS[part]}, file
                assert not module.startswith("test_"), file

    @pytest.mark.skipif(sys.version_info < (3, 10), reason="nobody knows it")
    @pytest.mark.parametrize("file", DROP_IN, ids=lambda file: file.name)
    def test_only_the_standard_library_is_imported(self, file: Path) -> None:
        """Both programs run where there is nothing but Python."""
        names = {one.partition(".")[0] for one in modules_imported_by(file)}
        assert "select" in names and names <= {*sys.stdlib_module_names}

    @pytest.mark.parametrize(
        "file", sorted([*PART_OF, *PAGES]), ids=lambda path: path.name
    )
    def test_cited_ids_exist(self, file: Path) -> None:
        """Every id in brackets is that of a rule."""
        cited = re.findall(r"\[([A-Z]+-\d+)\]", file.read_text("utf-8"))
        assert {*cited} <= {*read_rules()}

    def test_named_tests_exist(self) -> None:
        """What SECURITY.md says to be tested is tested there."""
        text = (ROOT / "SECURITY.md").read_text("utf-8")
        tests = "".join(path.read_text("utf-8") for path in TESTS)
        for name in re.findall(r"`([Tt]est_?[A-Z_a-z]+)`", text):
            assert re.search(rf"(class|def) {name}\b", tests), name

    def test_files_are_short(self) -> None:
        """Whoever opens one can read it."""
        limits = {DROP_IN[1]: 1_350, **dict.fromkeys(TESTS, 1_000)}
        for file in PART_OF:
            lines = file.read_text("utf-8").count("\n")
            assert lines <= limits.get(file, 1_500), file

    def test_folders_say_what_they_are_for(self) -> None:
        """In a README, or in the docstring of a package."""
        for folder in filter(Path.is_dir, ROOT.iterdir()):
            if folder.name[0] != "." and folder.name not in MADE:
                says = [folder / "README.md", folder / "__init__.py"]
                assert any(file.exists() for file in says), folder
