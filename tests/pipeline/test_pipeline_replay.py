"""Tests of replays, to a real bus."""

from __future__ import annotations

import base64
import time

import pytest

from pipeline_paper import capture_line

pytest.importorskip("pyspark", reason="it needs Python 3.10")

import sbus_spark
from pipeline_bed import TIMEOUT
from pipeline_without_spark import Bed
from sbus_client import Client

pytest_plugins = "pipeline_session"
pytestmark = TIMEOUT


def table_of(bed: Bed, *rows: str) -> str:
    """Return a table of messages, each in a segment of its own."""
    for number, row in enumerate(rows, 1):
        seconds, host, recorder, n, key, payload = row.split()
        data = base64.b64encode(payload.encode()).decode()
        about = {"t": round(float(seconds) * 1e9), "host": host, "key": key}
        about |= {"rec": recorder, "size": len(payload), "data": data}
        line = capture_line(int(n), **about)
        bed.write(f"R-{number:06}.jsonl", line)
    assert bed.ingest() == len(rows)
    return str(bed.table)


def test_messages_come_in_order(hearer: Client, bed: Bed) -> None:
    """By time and host, but a recorder's by number; secrets are keys."""
    ids = hearer.whoami()
    table = table_of(
        bed,
        "100000.000001 h r 1 é g", "100000 h r 10 B f",
        "100000 h r 9 k/a/b e", "100000 h q 11 k/é d",
        "100000 g r 12 k/ c", "1 z z 13 B b",
        f"0 z z 14 !/cred/{ids.gid}/{ids.uid}/{ids.pid}/x a",
    )  # fmt: skip
    for patterns, wanted in (
        ((), b"bacdgef"),
        (("k/*",), b"cd"),
        (("k/", "\xe9"), b"cdge"),
        (("!/cred/",), b"a"),
        (("nothing",), b""),
    ):
        selection = sbus_spark.Selection(patterns=patterns)
        count = sbus_spark.replay(table, hearer.address, selection=selection)
        heard = [hearer.receive() for _ in range(count)]
        assert b"".join(message.payload for message in heard) == wanted
        keys = {message.key for message in heard}
        assert {b"k/\xe9", b"\xe9"} & keys or count < 2


def test_a_speed_keeps_the_times(hearer: Client, bed: Bed) -> None:
    """So many times as fast: an hour does not go by in less than its part."""
    rows = "0 h r 1 k a", "1800 h r 2 k b", "3600 h r 3 k c"
    table = table_of(bed, *rows)
    for speed, seconds in ((float("inf"), 0.0), (7_200.0, 0.5)):
        began = time.monotonic()
        assert sbus_spark.replay(table, hearer.address, speed) == 3
        assert time.monotonic() - began >= seconds
        assert b"".join(hearer.receive()[1] for _ in "abc") == b"abc"


def test_a_message_without_its_payload(hearer: Client, bed: Bed) -> None:
    """It cannot be published, and the error names it."""
    bed.write("R-000001.jsonl", capture_line(1, key="k", data=None))
    assert bed.ingest() == 1
    with pytest.raises(sbus_spark.InputError, match="key 'k': .* without"):
        sbus_spark.replay(str(bed.table), hearer.address)
