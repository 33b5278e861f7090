"""Tests of reading segments in plain Python; Spark is not started."""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline_paper import capture_line

pytest.importorskip("pyspark", reason="it needs Python 3.10")

import pyarrow.parquet  # type: ignore[import-untyped]

from sbus_spark import segments
from sbus_spark.common import DAY
from sbus_spark.segments import FIELDS, message_of, messages_in, read_lines
from sizes import SOAK, either

GOOD = capture_line(7).strip()
ODD = [  # messages or not, which Arrow or its halving could take otherwise
    f"{GOOD}{GOOD}",
    f"{GOOD} {GOOD}",
    "",
    GOOD[:20],
    GOOD[20:],
    f"{GOOD[:-1]},",
    '"n": 3}',
    f"{GOOD} ",
    f" {GOOD}",
    f"{GOOD}\r",
    f"[{GOOD}]",
    "{}",
    "null",
    capture_line(2, extra={"a": []}).strip(),
    capture_line(2, extra="}{").strip(),
    capture_line(2, key="{}").strip(),
    capture_line(2, key="}\n{").strip(),
    capture_line(2, key="\xff").strip(),
    '{"n": 1, ' + GOOD[1:],
    GOOD.replace("}", ', "n": 9}'),
    GOOD.replace("h", "\xe9"),
    GOOD.replace("R", "\udcff"),  # a byte that is no UTF-8
    f"x{GOOD}",
    GOOD.replace('"k', '"\t'),
]
WRONG: dict[str, list[object]] = {
    "rec": [None, 1, "\ud800"],
    "n": [None, 0, -1, 1.0, True, "1", 1 << 53, (1 << 53) + 1, 1 << 64],
    "t": [None, -1, 0, (1 << 63) - 1, 1 << 63, "x"],
    "host": [None, "", "h" * 64, "h" * 65, "a\x7f", "é", segments.NONE],
    "key": [None, "", "\0", "\x01", "\u0100", "\ud800", 5],
    "size": [None, 6, 8, -1, "7"],
    "data": [None, "", "?", "eHh4eHh4eA", "eHh4eHh4eA==\n", "=", "eHh4é"],
}
LINES = ODD + [
    capture_line(7, **{name: value}).strip()
    for name, values in WRONG.items()
    for value in values
]


def one_by_one(text: bytes) -> tuple[list[object], list[object]]:
    """Return what read_lines is to find in whole lines."""
    found: list[object] = []
    bad: list[object] = []
    for line in text.split(b"\n")[:-1]:
        try:
            found.append(message_of(line))
        except ValueError as error:
            bad.append((str(error), line))
    return found, bad


@SOAK
@pytest.mark.parametrize("slow_bytes", [1, 2_000])
def test_many_lines_are_read_as_one_is(
    slow_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stands beside whatever."""
    monkeypatch.setattr(segments, "SLOW_BYTES", slow_bytes)
    chosen = random.Random(1)
    texts = [f"{one}\n" for one in LINES]
    texts += [f"{one}\n{two}\n" for one in ODD for two in ODD]
    for _ in range(either(5_000, 60)):
        some = chosen.choices([GOOD, *LINES], [500, *[1] * len(LINES)], k=40)
        texts.append("".join(f"{line}\n" for line in some))
    for text in texts:
        lines = text.encode("utf-8", "surrogateescape")
        tables, lists = zip(*read_lines(lines))
        rows = [row for table in tables for row in table.to_pylist()]
        bad = [one for some in lists for one in some]
        assert (rows, bad) == one_by_one(lines), text


def test_plain_lines_are_read_at_once() -> None:
    """Those of a recorder, but for keys in braces."""
    text = "".join(map(capture_line, range(1, 1_001))).encode()
    assert messages_in(text).num_rows == 1_000
    assert messages_in(text).schema.names == list(FIELDS)
    assert messages_in(text + b"\n") is None


@pytest.mark.parametrize(
    ("texts", "is_right"),
    [
        (["", "", ""], True),
        (["eA==", "", "eHh4", "eHg=", "/+8=", "eB=="], True),
        (["eA==", "e==="], False),
        (["eHh4", "===="], False),
        (["eHg=", "eH=4"], False),
        (["eHg", "=eHh4"], False),  # right if it were one
        (["eA", "==eHh4eA=="], False),
        (["eHh4", "eHh"], False),
        (["eHh4", "eH 4"], False),
        (["eHh4", "eHh4-_8="], False),
    ],
)
def test_payloads_are_decoded_at_once(
    texts: list[str], is_right: bool
) -> None:
    """To what each of them says; if one may be wrong, none is taken."""
    array = pyarrow.array(texts)
    if is_right:
        each = [base64.b64decode(text, validate=True) for text in texts]
        assert segments.payloads_of(array).to_pylist() == each
    else:
        with pytest.raises(ValueError):
            segments.payloads_of(array)


def test_a_segment_goes_where_it_belongs_however_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By day, host and batch; what is there of that batch is replaced."""
    monkeypatch.setattr(segments, "PIECE_BYTES", 150)
    path, table = tmp_path / "R-000001.jsonl", tmp_path / "table"
    hosts = ["a b", "c%/:[{"]
    good = [capture_line(n, t=n // 2 * DAY, host=hosts[n % 2]) for n in (2, 3)]
    path.write_text("".join([*good, "x\n", *good]) + capture_line(9).strip())
    before = os.umask(0o022)
    os.umask(before)
    for _ in range(2):
        segment = (0, f"file:{path}")
        draft = tmp_path / "draft"
        counts = segments.store_segment(str(draft), 5, 0o027, segment)
        assert counts == (6, 1) and os.umask(before) == before
        made = draft.rglob("part-*")
        assert {file.stat().st_mode & 0o777 for file in made} == {0o640}
        table.mkdir(exist_ok=True)
        segments.publish(str(draft), str(table))
        shutil.rmtree(draft)
        (table / "day=1970-01-02" / "host=a b" / "batch=4").mkdir(
            exist_ok=True
        )
    found = {
        str(folder.relative_to(table)): sum(
            pyarrow.parquet.ParquetFile(file).metadata.num_rows
            for file in folder.iterdir()
        )
        for folder in table.glob("day=*/*/*")
    }
    assert found == {
        "day=1970-01-02/host=a b/batch=4": 0,
        "day=1970-01-02/host=a b/batch=5": 2,
        "day=1970-01-02/host=c%25%2F%3A%5B%7B/batch=5": 2,
        "day=2025-11-21/host=h/batch=5": 1,
    }
    (aside,) = table.glob("_quarantine/batch=5/part-*.json")
    row = {"file": f"file:{path}", "line": "x"}
    reason = "not a JSON object of ours"
    assert json.loads(aside.read_text()) == {**row, "reason": reason}


def test_a_task_that_was_given_up_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes its part of one batch when the next is written."""
    files = [tmp_path / f"R-00000{n}.jsonl" for n in (1, 2, 3)]
    for n, file in enumerate(files, 1):
        file.write_text(capture_line(n))
    names = [f"file:{file}" for file in files]
    given: list[tuple[Any, ...]] = []

    def late(*arguments: Any) -> tuple[int, int]:
        if len(given) == 2:
            store_segment(*given[0])
        given.append(arguments)
        return store_segment(*arguments)

    store_segment = segments.store_segment
    monkeypatch.setattr(segments, "store_segment", late)
    table = tmp_path / "table"
    for batch, some in enumerate([names[:2], names[2:]]):
        counts = segments.store(Here(), some, str(table), batch)  # type: ignore
        assert counts == (len(some), 0)
    rows = [
        row["n"]
        for path in sorted(table.glob("day=*/host=h/batch=*/part-*"))
        for row in pyarrow.parquet.ParquetFile(path).read().to_pylist()
    ]
    assert rows == [1, 2, 3]
    assert not list(table.glob("_drafts*"))


class Here:
    """Stands for a context of Spark, and for the RDD that it makes."""

    defaultParallelism = 1

    def getConf(self) -> dict[str, str]:
        return {}

    def parallelize(self, some: list[Any], tasks: int) -> Here:
        assert len(some) == tasks
        self.some = some
        return self

    def map(self, task: Any) -> Here:
        self.some = [task(one) for one in self.some]
        return self

    def collect(self) -> list[Any]:
        return self.some
