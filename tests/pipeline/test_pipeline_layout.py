"""Tests of how the pipeline is laid out, and of how it is started."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="it needs Python 3.10")

from sbus_spark import write_archive
from sbus_spark.launch import sockets

PIPELINE = Path(__file__).parents[2] / "pipeline"
PACKAGE = PIPELINE / "sbus_spark"


def imports_of(path: Path) -> set[str]:
    """Return what a file imports; modules beside it begin with a dot."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            found.add("." * node.level + str(node.module))
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    return found


def test_a_module_imports_only_those_above_it() -> None:
    """As __init__.py lists them; of the repository, sbus and sbus_client."""
    text = (PACKAGE / "__init__.py").read_text("utf-8")
    listed = re.findall(r"^    (\w+) {2,}\w", text, re.MULTILINE)
    modules = {path.stem for path in PACKAGE.glob("[!_]*.py")}
    assert set(listed) == modules and len(listed) == len(modules)
    of_others = {"numpy", "py4j", "pyarrow", "pyspark"}
    of_others |= {"sbus", "sbus_client"}
    for at, name in enumerate(listed):
        allowed = {f".{above}" for above in listed[:at]} | of_others
        found = imports_of(PACKAGE / f"{name}.py")
        assert found - sys.stdlib_module_names <= allowed, name


def test_the_archive_has_all_that_is_imported(tmp_path: Path) -> None:
    """And nothing else; it is imported as it is, and is compiled already."""
    path = tmp_path / "code.zip"
    write_archive(path)
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
    package = {f"sbus_spark/{file.name}" for file in PACKAGE.glob("*.py")}
    texts = package | {"sbus.py", "sbus_client.py"}
    assert names == texts | {f"{name}c" for name in texts}
    assert imported_from(path) == f"{path} {path}/sbus.pyc\n"
    other = tmp_path / "other.zip"
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(other, "w") as made:
        for name in names:
            text = archive.read(name)
            if name.endswith("c"):  # as if by a Python of another version
                text = b"\0\0\r\n" + text[4:]
            made.writestr(name, text)
    assert imported_from(other) == f"{other} {other}/sbus.py\n"


def imported_from(archive: Path) -> str:
    """Return where the package, and sbus, say that they are from."""
    script = """
import sbus, sbus_spark.launch
print(sbus_spark.launch.code_archive(), sbus.__file__)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=archive.parent,
        env={"PYTHONPATH": str(archive)},
        capture_output=True,
        text=True,
    )
    assert not done.stderr
    return done.stdout


@pytest.mark.parametrize("how", [[str(PACKAGE)], ["-m", "sbus_spark"]])
def test_started_by_its_path_and_by_its_name(
    how: list[str], tmp_path: Path
) -> None:
    """From anywhere; by its path without having been installed."""
    paths = [] if how[0] != "-m" else [str(PIPELINE), str(PIPELINE.parent)]
    done = subprocess.run(
        [sys.executable, *how, "--help"],
        cwd=tmp_path,
        env={"PYTHONPATH": ":".join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("usage: sbus_spark "), done.stderr


@pytest.mark.parametrize(
    ("master", "folder", "is_used"),
    [
        ("local", "/tmp/a", True),
        ("local[*]", "/" + 63 * "a", True),
        ("local[2]", "/" + 64 * "a", False),  # no address is as long
        ("local[2]", "/" + 32 * "\xe9", False),
        ("local-cluster[2,1,1024]", "/tmp/a", False),
        ("spark://host:7077", "/tmp/a", False),
    ],
)
def test_sockets_of_files_where_all_is_on_one_host(
    master: str, folder: str, is_used: bool
) -> None:
    """Executors of others have no such folder."""
    assert (folder in sockets(master, folder).values()) == is_used
