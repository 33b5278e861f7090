"""Tests of spec/vectors: what they hold, and that they are of the chapters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

import traceability
from conformance.examples import PacketCase
from conformance.kit import level_of, origin_of
from fake_bus import CASES


def schema_errors(value: Any, schema: Any, root: Any) -> Iterator[str]:
    """Return what a value breaks of as much of JSON Schema as we use."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    kinds: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
    }
    if "type" in schema and not isinstance(value, kinds[schema["type"]]):
        yield f"{value!r} is not of type {schema['type']}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{value!r} is not one of {schema['enum']}"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{value!r} does not match {schema['pattern']}"
    if "anyOf" in schema and all(
        any(schema_errors(value, choice, root)) for choice in schema["anyOf"]
    ):
        yield f"{value!r} is none of those allowed"
    for item in value if "items" in schema else ():
        yield from schema_errors(item, schema["items"], root)
    if "properties" in schema:
        yield from (f"no {name}" for name in {*schema["required"]} - {*value})
        for name in value:
            known = schema["properties"].get(name, {"enum": ()})
            yield from schema_errors(value[name], known, root)


class TestVectors:
    @pytest.mark.parametrize("name", sorted(traceability.vectors()))
    def test_are_those_of_the_chapters(self, name: str) -> None:
        """If not: make vectors."""
        written = (traceability.VECTORS / name).read_text("utf-8")
        assert written == traceability.vectors()[name]

    @pytest.mark.parametrize("name", sorted(traceability.vectors()))
    def test_keep_their_schema(self, name: str) -> None:
        """Whoever reads them can rely on it."""
        vectors = traceability.VECTORS
        schema = json.loads((vectors / "schema.json").read_text("utf-8"))
        for case in json.loads((vectors / name).read_text("utf-8")):
            assert not [*schema_errors([case], schema, schema)]
            assert [*schema_errors([{**case, "name": 7}], schema, schema)]

    def test_there_are_enough(self) -> None:
        """The patterns and keys are chosen, and both answers occur."""
        path = traceability.VECTORS / "match.json"
        cases = json.loads(path.read_text("utf-8"))
        written = [case for case in cases if "every-byte" not in case["name"]]
        assert len(cases) > 1000
        assert len(written) > 280
        assert 120 < sum(case["selected"] for case in written) < 200

    def test_of_upstream_ask_for_no_disconnection(self) -> None:
        """The original text lets a server ignore what it does not accept."""
        for case in CASES:
            if origin_of(case) != "upstream":
                continue
            if level_of(case) != "choice":
                steps = case.conversation().steps
                assert all(step.argument != "end" for step in steps), case

    def test_of_packets_agree_with_the_syntax(self) -> None:
        """[PKT-1] [PKT-2] So say the regular expressions of chapter 3."""
        forms = {
            "subscribe": rb"SUB ([^\x00]*)(?:\x00.*)?()",
            "unsubscribe": rb"UNSUB ([^\x00]*)(?:\x00.*)?()",
            "publish": rb"MSG ([^\x00]*)\x00(.*)",
            "control": rb"CMSG ([^\x00]*)(?:\x00(.*))?",
        }
        for case in CASES:
            if isinstance(case, PacketCase) and "KEY-4" not in case.rules:
                found = {
                    kind: (match[1], match[2] or b"")
                    for kind, form in forms.items()
                    if (match := re.fullmatch(form, case.packet, re.S))
                }
                if case.packet_kind == "invalid":
                    assert not found, case
                else:
                    expected = {case.packet_kind: (case.key, case.payload)}
                    assert found == expected, case
