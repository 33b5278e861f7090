"""Tests of the specification itself, and of the conformance kit.

Every example of spec/ is run on a fake kernel, where what cannot be seen on
a real one can be: backlogs and clocks.  All that a client can see is run
against sbus.py as a process, and against any server that SBUS_SERVER names.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import pytest

import conformance
import sbus
import testbed
import traceability
from broken_servers import BROKEN, Broken
from conformance import (
    END,
    Block,
    Case,
    Failure,
    Kit,
    MatchCase,
    PacketCase,
    Result,
    ServerProcess,
    perform,
)
from testbed import HERE, WHOAMI, FakeKernel, FakePeer

BLOCKS = list(conformance.read_blocks())
CASES = conformance.read_cases()
OWNER = 500  # the bus owner on a fake kernel, as whom the kit runs
OURS = f"{sys.executable} {HERE / 'sbus.py'} -f -a {{address}}"


# =============================================================================
# A server in this process
# =============================================================================


@contextlib.contextmanager
def crashes_are_failures() -> Iterator[None]:
    """Report an exception of the server as what it is: the server's end."""
    try:
        yield
    except Failure:
        raise
    except Exception as error:
        raise Failure(f"the server crashed: {error!r}") from error


class FakeConnection:
    """A client on a fake kernel; see conformance.Connection."""

    def __init__(self, kernel: FakeKernel, peer: FakePeer) -> None:
        self.kernel = kernel
        self.wire = peer.wire
        self.gid, self.uid, self.pid = peer.wire.credentials

    def send(self, packet: bytes) -> None:
        if self.wire.closed:
            raise Failure("cannot send: the server has closed")
        self.wire.incoming.append(packet)

    def settle(self) -> None:
        with crashes_are_failures():
            self.kernel.run()

    def receive(self) -> bytes:
        self.settle()
        packet = self.pending()
        if packet is None:
            raise Failure("received nothing")
        if packet != END:
            self.wire.taken.popleft()
            self.settle()
        return packet

    def pending(self) -> bytes | None:
        if self.wire.taken:
            return self.wire.taken[0]
        return END if self.wire.closed else None

    def shut(self) -> None:
        self.wire.ended = True

    def deafen(self) -> None:
        self.wire.deaf = True

    def close(self) -> None:
        self.wire.reset = bool(self.wire.taken)
        self.wire.ended = self.wire.deaf = True

    def set_room(self, count: int) -> None:
        self.wire.room = count


class FakeBus:
    """A server on a fake kernel; see conformance.Bus."""

    def __init__(self, options: Sequence[str]) -> None:
        parsed = sbus.parse_options(list(options))
        fields = sbus.Limits._fields
        self.kernel = FakeKernel(
            sbus.Limits(*(getattr(parsed, field) for field in fields)),
            OWNER,
            strict=parsed.strict,
            cred_prefix=parsed.cred_prefix,
            allowed_uids={OWNER, *parsed.user} if parsed.user else None,
        )

    def connect(
        self, is_process: bool, credentials: dict[str, int]
    ) -> FakeConnection:
        with crashes_are_failures():
            peer = self.kernel.connect(**{"uid": OWNER, **credentials})
        return FakeConnection(self.kernel, peer)

    def wait(self, seconds: float) -> None:
        with crashes_are_failures():
            self.kernel.wait(seconds)

    def fault(self) -> str:
        try:
            self.wait(0)
            client = self.connect(False, {})
            client.send(WHOAMI)
            answer = client.receive()
        except Failure as failure:
            return str(failure)
        return "" if answer.startswith(WHOAMI) else f"answered {answer!r}"


def run_on_fake_kernel(case: Case) -> Result:
    """Run one case in this process."""
    conversation = case.conversation()
    wrong, said = perform(FakeBus(conversation.options), conversation)
    if isinstance(case, MatchCase) and not wrong:
        server: Any = vars(testbed)["sbus"]  # or a broken one
        selected = server.pattern_matches(case.pattern, case.key)
        if selected is not case.selected:
            wrong = "the definition does not agree with the table"
    verdict = "failed" if wrong else "passed"
    return Result(case.name, case.rules, verdict, wrong, tuple(said))


def explain(results: Sequence[Result]) -> str:
    """Return the failures among some results."""
    lines: list[str] = []
    for result in results:
        if result.verdict == "failed":
            lines += ["", *conformance.failure_lines(result)]
    return "\n".join(lines)


def cases_of(block: Block) -> list[Case]:
    """Return the cases of a block."""
    return list(conformance.PARSERS[block.kind](block))


each_block = pytest.mark.parametrize(
    "block", BLOCKS, ids=[block.name for block in BLOCKS]
)


class TestExamples:
    @each_block
    def test_on_a_fake_kernel(self, block: Block) -> None:
        """The server does what the example says."""
        results = [run_on_fake_kernel(case) for case in cases_of(block)]
        assert results and not explain(results), explain(results)

    def test_on_real_sockets(self) -> None:
        """So it does as a process of its own."""
        with ServerProcess(OURS, testbed.SECONDS_MAX) as server:
            results = Kit(server, ours=True, choices=True).run(CASES)
        assert not explain(results), explain(results)
        assert conformance.count(results, "passed") > 880

    @pytest.mark.skipif(
        "SBUS_SERVER" not in os.environ, reason="SBUS_SERVER names none"
    )
    def test_on_the_server_that_is_named(self) -> None:
        """So does any other server that is said to."""
        with ServerProcess(os.environ["SBUS_SERVER"], 5.0) as server:
            results = Kit(server, ours=False, choices=False).run(CASES)
        assert not explain(results), explain(results)


# =============================================================================
# Vectors
# =============================================================================


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
        assert len(cases) > 700
        assert len(written) > 250
        assert 100 < sum(case["selected"] for case in written) < 200

    def test_of_packets_agree_with_the_parser(self) -> None:
        """[PKT-1] [PKT-2] The server's own parser is held to them."""
        for case in CASES:
            if not isinstance(case, PacketCase):
                continue
            expected = (case.packet_kind, case.key, case.payload)
            try:
                assert sbus.parse_packet(case.packet) == expected, case
            except sbus.PacketError:
                assert case.packet_kind == "invalid", case

    def test_of_packets_agree_with_the_syntax(self) -> None:
        """[PKT-1] The regular expressions of chapter 3 say the same."""
        forms = {
            "subscribe": rb"SUB ([^\x00]*)(?:\x00.*)?()",
            "unsubscribe": rb"UNSUB ([^\x00]*)(?:\x00.*)?()",
            "publish": rb"MSG ([^\x00]*)\x00(.*)",
            "control": rb"CMSG ([^\x00]*)(?:\x00(.*))?",
        }
        for case in CASES:
            if isinstance(case, PacketCase):
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


# =============================================================================
# The trace check
# =============================================================================

RULES = conformance.read_rules()


def is_binding(rule: conformance.Rule) -> bool:
    """Return whether somebody must keep a rule, or should."""
    return rule.level != "MAY" and rule.id not in traceability.BY_USERS


class TestTraceability:
    def test_rules_are_as_they_were_reviewed(self) -> None:
        """An edited sentence makes its citations stale.

        Look at what cites it, and then: make requirements.
        """
        written = traceability.REQUIREMENTS.read_text("utf-8").splitlines()
        current = traceability.requirements().splitlines()
        changed = {*current} ^ {*written}
        code, tests = traceability.code_by_rule(), traceability.tests_by_rule()
        stale = [
            f"{name}: {code.get(name)} {tests.get(name)}"
            for name in {line.split("\t")[0] for line in changed}
        ]
        assert not stale and written == current

    def test_the_right_file_cites_each_rule(self) -> None:
        """In a comment or a docstring of the server, or of the client."""
        code = traceability.code_by_rule()
        files = {"server": "sbus.py", "client": "sbus_client.py"}
        missing = [
            rule.id
            for rule in filter(is_binding, RULES.values())
            if not any(
                place.startswith(files[rule.subject])
                for place in code[rule.id]
            )
        ]
        assert not missing

    def test_choices_are_explained(self) -> None:
        """Chapter 9 tells what we do where a server MAY."""
        choices = (conformance.SPEC / "9-choices.md").read_text("utf-8")
        for rule in RULES.values():
            assert rule.level != "MAY" or f"[{rule.id}]" in choices

    def test_every_rule_is_shown_or_cannot_be(self) -> None:
        """What a client can see has an example, and nothing else has."""
        for name, examples in traceability.examples_by_rule().items():
            reason = traceability.why_not_visible(RULES[name])
            assert bool(examples) != bool(reason), name

    def test_match_and_invalid_packet_blocks_show_both_sides(self) -> None:
        """A rule about matching is shown by what matches and what does not."""
        for name, rule in RULES.items():
            answers = {
                case.selected
                for case in CASES
                if isinstance(case, MatchCase) and name in case.rules
            }
            one_sided = {"MATCH-4"}  # the empty pattern selects all
            assert rule.family != "MATCH" or (
                answers == {True, False} or name in one_sided
            )

    def test_the_matrix_has_every_rule(self) -> None:
        """If not: make trace."""
        text = traceability.TRACEABILITY.read_text("utf-8")
        assert re.findall(r"^\| ([A-Z]+-\d+) ", text, re.M) == [*RULES]

    @each_block
    def test_citations_are_live(self, block: Block) -> None:
        """An example runs code that cites its rules."""
        live = rules_of_functions_run_by(cases_of(block))
        assert {*block.rules} - NOT_LIVE <= live

    def test_every_rule_has_a_test_that_passed(
        self, rules_that_passed: set[str]
    ) -> None:
        """In this run; what was skipped does not count."""
        binding = {rule.id for rule in RULES.values() if is_binding(rule)}
        assert not binding - rules_that_passed


NOT_LIVE = {"CONN-1"}  # cited where sockets are made, and there are none


def rules_of_functions_run_by(cases: Sequence[Case]) -> set[str]:
    """Return the rules that are cited by the functions that cases run.

    sys.setprofile sees what sys.settrace does, and leaves that to coverage.
    """
    called: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.add(frame.f_code)

    sys.setprofile(note)
    try:
        for case in cases:
            run_on_fake_kernel(case)
    finally:
        sys.setprofile(None)
    lines = {
        code.co_firstlineno
        for code in called
        if code.co_filename == sbus.__file__
    }
    return {rule for line in lines for rule in RULES_AT.get(line, ())}


def rules_by_first_line() -> dict[int, set[str]]:
    """Return what each function of the server cites, or its class for it."""
    places = traceability.citations(HERE / "sbus.py")
    by_name = {place.name: place.rules for place in places}
    return {
        place.first_line: {
            *place.rules,
            *by_name.get(place.name.rpartition(".")[0] or "no class", ()),
        }
        for place in places
        if place.name
    }


RULES_AT = rules_by_first_line()


# =============================================================================
# Broken servers
# =============================================================================


@contextlib.contextmanager
def broken_server(broken: Broken) -> Iterator[None]:
    """Put a broken server in the place of sbus, on the fake kernel."""
    source = (HERE / "sbus.py").read_text("utf-8")
    assert source.count(broken.old) == 1, "mend this entry: see its file"
    module = ModuleType("sbus_broken")
    code = source.replace(broken.old, broken.new)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        exec(compile(code, broken.name, "exec"), module.__dict__)
        patch.setattr(testbed, "sbus", module)
        yield


class TestBrokenServers:
    def test_there_are_enough(self) -> None:
        """Each breaks another way, and every chapter is broken."""
        assert len({broken.name for broken in BROKEN}) == len(BROKEN) > 30
        assert {RULES[one.rule].file[0] for one in BROKEN} == {*"1234567"}

    @pytest.mark.parametrize("broken", BROKEN, ids=lambda one: one.name)
    def test_the_kit_finds_it(self, broken: Broken) -> None:
        """It names the rule that is broken."""
        cases = [case for case in CASES if broken.rule in case.rules]
        with broken_server(broken):
            results = [run_on_fake_kernel(case) for case in cases]
        assert conformance.count(results, "failed")


# =============================================================================
# The kit
# =============================================================================

NAIVE = HERE / "naive_server.py"


def naive(path: Path = NAIVE) -> str:
    """Return the command of the naive server, or of a copy of it."""
    return f"{sys.executable} {path} {{address}}"


@pytest.fixture
def directory() -> Iterator[Path]:
    with testbed.scratch_directory() as path:
        yield path


def run_kit(*arguments: str) -> testbed.Result:
    """Run the command."""
    return testbed.run("conformance.py", *arguments)


def broken_naive(directory: Path, statement: str) -> str:
    """Return a naive server that does *statement* when one unsubscribes."""
    source = NAIVE.read_text("utf-8")
    start = '        head, nul, _ = packet.partition(b"\\0")\n'
    assert source.count(start) == 1
    when = (
        f'        if packet.startswith(b"UNSUB"):\n            {statement}\n'
    )
    path = directory / "server.py"
    path.write_text(source.replace(start, start + when), "utf-8")
    return naive(path)


class TestKit:
    def test_a_server_in_another_style_keeps_what_upstream_asks_for(
        self,
    ) -> None:
        """The naive server passes, without the rules that are ours."""
        done = run_kit("--server", naive(), "--seconds", "20", "--json")
        report = json.loads(done.output)
        verdicts = report["rules"]
        assert done.status == 0 and not done.errors, done
        assert verdicts["MATCH-2"] == verdicts["CRED-10"] == "passed"
        assert verdicts["LIMIT-4"] == "not applicable"
        assert verdicts["RUN-1"] == "no example"

    def test_rules_of_ours_are_reported(self) -> None:
        """Those that a server does not keep are named, and it goes on."""
        families = ("--only", "ECHO", "--only", "KEY-3", "--only", "CTL-5")
        command = ("--server", naive(), "--ours", "--seconds", "0.5")
        done = run_kit(*command, *families)
        assert done.status == 1
        assert "FAILED [ECHO-2] echo-off, step " in done.output
        assert "    A > CMSG echo/off\n" in done.output
        assert "    -> received MSG k\\0after\n" in done.output
        assert re.search(r"^CTL +\d/\d passed$", done.output, re.M)

    def test_a_crash_is_a_finding(self, directory: Path) -> None:
        """[UNSUB-1] The server is started anew, and the rest is run."""
        command = broken_naive(directory, "os._exit(3)")
        done = run_kit("--server", command, "--only", "UNSUB", "--only", "SUB")
        assert done.status == 1
        assert "FAILED [UNSUB-1] unsubscribe-is-for-oneself" in done.output
        assert "the server ended with status 3" in done.output
        assert "SUB-3] text-after-nul-in-subscribe" not in done.output

    def test_a_hang_is_a_finding(self, directory: Path) -> None:
        """[UNSUB-1] Nothing is waited for beyond its deadline."""
        command = broken_naive(directory, "threading.Event().wait()")
        only = ("--only", "unsubscribe-is-for-oneself", "--only", "SUB-3")
        done = run_kit("--server", command, "--seconds", "0.5", *only)
        assert done.status == 1
        assert "FAILED [UNSUB-1] unsubscribe-is-for-oneself" in done.output
        assert "the server does not answer a new client" in done.output
        assert "3 passed, 1 failed, 0 not applicable" in done.output

    def test_the_report_can_be_published(self) -> None:
        """It is Markdown with a row for each rule."""
        chosen = ("--only", "SUB", "--markdown")
        done = run_kit("--server", naive(), *chosen)
        assert done.status == 0
        assert "| SUB-1 | MUST | upstream | passed | " in done.output
        assert done.output.startswith("# sbus conformance report\n")
        assert done.output.count("\n| ") == len(RULES) + 1

    def test_a_server_that_does_not_start(self) -> None:
        """It is said in one line, with the status 2."""
        done = run_kit("--server", "sh -c 'echo no; exit 4' {address}")
        assert (done.status, done.output) == (2, "")
        assert done.errors.startswith("conformance.py: the server does not")

    def test_a_command_without_a_place_for_the_address(self) -> None:
        """It is wrong usage."""
        assert run_kit("--server", "true").status == 2

    @pytest.mark.parametrize(
        "line", ["A", "A > \\q", "A > {b.pid", "a > SUB k", "A room", "go"]
    )
    def test_step_that_is_none(self, line: str) -> None:
        """A slip in an example is not passed over."""
        block = Block("conversation", "x", ("SUB-1",), (line,), "x.md")
        with pytest.raises((ValueError, AssertionError)):
            list(conformance.conversations(block))

    def test_only_the_standard_library_is_imported(self) -> None:
        """Implementers need spec/ and this one file."""
        source = (HERE / "conformance.py").read_text("utf-8")
        imported = re.findall(r"^(?:from|import) (\w+)", source, re.M)
        if sys.version_info >= (3, 10):
            assert {*imported} <= sys.stdlib_module_names
