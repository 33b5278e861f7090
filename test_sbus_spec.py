"""Tests of the specification itself, and of the conformance kit.

Every example of spec/ is run on a fake kernel, where what cannot be seen on
a real one can be: backlogs and clocks.  All that a client can see is run
against sbus.py as a process, and what the original protocol asks for also
against the server that SBUS_SERVER names, as a command with {address} in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import pytest

import fake_kernel
import programs
import sbus
import traceability
from broken_servers import BROKEN, Broken
from conformance.conversation import END, Failure, perform
from conformance.examples import (
    PARSERS,
    Block,
    Case,
    MatchCase,
    PacketCase,
    conversations,
    read_blocks,
    read_cases,
)
from conformance.kit import Kit, Result, level_of, origin_of
from conformance.report import count, failure_lines, failures_by_rule
from conformance.rules import SPEC, Rule, read_rules
from conformance.server import ServerProcess
from fake_kernel import FakeKernel, FakePeer
from packets import WHOAMI
from programs import ROOT, SECONDS_MAX, run

BLOCKS = list(read_blocks())
CASES = read_cases()
OWNER = 500  # the bus owner on a fake kernel, as whom the kit runs
OURS = f"{sys.executable} {ROOT / 'sbus.py'} -f -a {{address}}"


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
    """A client on a fake kernel; see Connection."""

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
    """A server on a fake kernel; see Bus."""

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
        server: Any = vars(fake_kernel)["sbus"]  # or a broken one
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
            lines += ["", *failure_lines(result)]
    return "\n".join(lines)


def cases_of(block: Block) -> list[Case]:
    """Return the cases of a block."""
    return list(PARSERS[block.kind](block))


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
        with ServerProcess(OURS, SECONDS_MAX) as server:
            results = Kit(server, ours=True, choices=True).run(CASES)
        assert not explain(results), explain(results)
        assert count(results, "passed") > 1150

    def test_on_the_server_that_is_named(self) -> None:
        """So does any other server, where the original protocol asks it."""
        command = os.environ.get("SBUS_SERVER", naive())
        with ServerProcess(command, SECONDS_MAX / 2) as server:
            results = Kit(server, ours=False, choices=False).run(CASES)
        assert not explain(results), explain(results)
        assert count(results, "passed") > 1000


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
        assert len(cases) > 1000
        assert len(written) > 280
        assert 120 < sum(case["selected"] for case in written) < 200

    def test_of_upstream_ask_for_no_disconnection(self) -> None:
        """The original text lets a server ignore what it does not accept."""
        for case in CASES:
            if origin_of(case, RULES) == "ours":
                continue
            if level_of(case, RULES) != "choice":
                steps = case.conversation().steps
                assert all(step.argument != "end" for step in steps), case

    def test_of_packets_agree_with_the_parser(self) -> None:
        """[PKT-1] [PKT-2] The server's own parser is held to them."""
        for case in CASES:
            if not isinstance(case, PacketCase):
                continue
            expected = (case.packet_kind, case.key, case.payload)
            try:
                assert sbus.parse_packet(case.packet) == expected, case
            except sbus.ProtocolError:
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

RULES = read_rules()


def is_binding(rule: Rule) -> bool:
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
        choices = (SPEC / "9-choices.md").read_text("utf-8")
        for rule in RULES.values():
            assert rule.level != "MAY" or f"[{rule.id}]" in choices

    def test_every_rule_is_shown_or_cannot_be(self) -> None:
        """What a client can see has an example, and nothing else has."""
        for name, examples in traceability.examples_by_rule().items():
            reason = traceability.why_not_visible(RULES[name])
            assert bool(examples) != bool(reason), name

    def test_rules_on_matching_are_shown_from_both_sides(self) -> None:
        """By what a pattern selects, and by what it does not."""
        answers: dict[str, set[bool]] = {"MATCH-4": {False}}  # selects all
        for case in CASES:
            if isinstance(case, MatchCase):
                for rule in case.rules:
                    answers.setdefault(rule, set()).add(case.selected)
        assert {one for one in RULES if one.startswith("MATCH")} <= {*answers}
        assert all(len(both) == 2 for both in answers.values()), answers

    def test_the_matrix_has_every_rule(self) -> None:
        """If not: make trace."""
        text = traceability.TRACEABILITY.read_text("utf-8")
        assert re.findall(r"^\| ([A-Z]+-\d+) ", text, re.M) == [*RULES]

    @each_block
    def test_citations_are_live(self, block: Block) -> None:
        """An example runs code that cites its rules."""
        live = rules_of_functions_run_by(cases_of(block)[:20])
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
    places = traceability.citations(ROOT / "sbus.py")
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
    source = (ROOT / "sbus.py").read_text("utf-8")
    assert source.count(broken.old) == 1, "mend this entry: see its file"
    module = ModuleType("sbus_broken")
    code = source.replace(broken.old, broken.new)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        exec(compile(code, broken.name, "exec"), module.__dict__)
        patch.setattr(fake_kernel, "sbus", module)
        yield


class TestBrokenServers:
    def test_every_rule_that_clients_can_see_is_broken(self) -> None:
        """Some in several ways, each with its own name."""
        assert len({broken.name for broken in BROKEN}) == len(BROKEN)
        on_real_sockets = {"CONN-1", "CONN-4"}
        shown = {rule for case in CASES for rule in case.rules}
        assert {one.rule for one in BROKEN} == shown - on_real_sockets

    @pytest.mark.parametrize("broken", BROKEN, ids=lambda one: one.name)
    def test_the_kit_finds_it(self, broken: Broken) -> None:
        """It names the rule that is broken, and first of all."""
        cases = [case for case in CASES if broken.rule in case.rules]
        with broken_server(broken):
            results = [run_on_fake_kernel(case) for case in cases]
        assert broken.rule in failures_by_rule(results)


# =============================================================================
# The kit
# =============================================================================

NAIVE = ROOT / "tests/naive_server.py"


def naive(path: Path = NAIVE) -> str:
    """Return the command of the naive server, or of a copy of it."""
    return f"{sys.executable} {path} {{address}}"


def run_kit(*arguments: str) -> programs.Result:
    """Run the command."""
    return run("spec/conformance", *arguments)


def broken_naive(directory: Path, statement: str, start: str = "UNSUB") -> str:
    """Return a naive server that does *statement* on packets of a kind."""
    source = NAIVE.read_text("utf-8")
    place = '        head, nul, _ = packet.partition(b"\\0")\n'
    assert source.count(place) == 1
    when = (
        f'        if packet.startswith(b"{start}"):\n            {statement}\n'
    )
    path = directory / "server.py"
    path.write_text(source.replace(place, place + when), "utf-8")
    return naive(path)


# A server's beginning; what is wrong with it comes after that
USELESS = """
import socket, sys, time
from socket import SOCK_SEQPACKET as SEQPACKET, SOCK_STREAM as STREAM
wires = []
def listen(kind):
    listener = socket.socket(socket.AF_UNIX, kind)
    listener.bind(sys.argv[1])
    listener.listen()
    return listener
def serve(welcome):
    listener = listen(SEQPACKET)
    while True:
        welcome(listener.accept()[0])
def flood(wire):
    try:
        while True:
            wire.send(b"MSG k\\0")
    except OSError:
        pass
"""


class TestKit:
    def test_the_report_can_be_processed(self) -> None:
        """It is JSON with the verdict on each rule."""
        only = ("--only", "CRED", "--only", "LIMIT")
        done = run_kit("--server", naive(), "--json", *only)
        report = json.loads(done.output)
        assert done.status == 0 and not done.errors, done
        assert [*report["rules"]] == [*RULES]
        assert report["rules"]["CRED-11"] == "passed"
        assert report["rules"]["LIMIT-4"] == "not applicable"
        assert report["rules"]["PUB-1"] == "not run"
        assert report["rules"]["RUN-1"] == "no example"
        assert re.fullmatch("[0-9a-f]{8}", report["specification"])

    def test_rules_of_ours_are_reported(self) -> None:
        """Those that a server does not keep are named, and it goes on."""
        families = ("--only", "ECHO", "--only", "KEY-3", "--only", "CTL-5")
        command = ("--server", naive(), "--ours", "--seconds", "1")
        done = run_kit(*command, *families)
        assert done.status == 1
        assert "FAILED [ECHO-2] A server MUST NOT send the" in done.output
        assert "  echo-off [ECHO-2], step " in done.output
        assert "    A > CMSG echo/off\n" in done.output
        assert "    -> received MSG k\\0after\n" in done.output
        assert re.search(r"^CTL +\d/\d passed$", done.output, re.M)

    def test_a_crash_is_a_finding(self, directory: Path) -> None:
        """[UNSUB-1] The server is started anew, and the rest is run."""
        command = broken_naive(directory, "os._exit(3)")
        done = run_kit("--server", command, "--only", "UNSUB", "--only", "SUB")
        assert done.status == 1
        assert "  unsubscribe-is-for-oneself [UNSUB-1]" in done.output
        assert "the server ended with status 3" in done.output
        assert "FAILED [SUB-3]" not in done.output

    def test_a_hang_is_a_finding(self, directory: Path) -> None:
        """[UNSUB-1] Nothing is waited for beyond its deadline."""
        command = broken_naive(directory, "threading.Event().wait()")
        only = ("--only", "unsubscribe-is-for-oneself", "--only", "SUB-3")
        done = run_kit("--server", command, "--seconds", "1", *only)
        assert done.status == 1
        assert "  unsubscribe-is-for-oneself [UNSUB-1]" in done.output
        assert "!/cred/whoami is not answered in time; the" in done.output
        assert "3 passed, 1 failed, 0 not applicable" in done.output

    def test_a_server_that_knows_no_options(self, directory: Path) -> None:
        """What needs one is not applicable, and told once."""
        path = directory / "server.py"
        source = NAIVE.read_text("utf-8")
        check = 'if len(sys.argv) > 2:\n    sys.exit("usage")\nlock ='
        path.write_text(source.replace("\nlock =", "\n" + check), "utf-8")
        only = ("--only", "CRED-9", "--only", "CRED-2", "--ours")
        done = run_kit("--server", naive(path), *only)
        assert done.status == 0, done
        message = "2: with --cred-prefix !/cred/1/2/3: the server ended with"
        assert f"not applicable, {message} status 1: usage" in done.output

    def test_the_report_can_be_published(self) -> None:
        """It is Markdown with a row for each rule."""
        chosen = ("--only", "SUB", "--markdown")
        done = run_kit("--server", naive(), *chosen)
        assert done.status == 0
        assert "| SUB-1 | MUST | upstream | passed | " in done.output
        assert done.output.startswith("# sbus conformance report\n")
        assert done.output.count("\n| ") == len(RULES) + 1

    def test_a_server_that_hangs_does_not_take_hours(
        self, directory: Path
    ) -> None:
        """Of many examples that are alike a few are enough."""
        command = broken_naive(directory, "threading.Event().wait()", "MSG")
        only = ("--only", "byte-for-itself")
        done = run_kit("--server", command, "--seconds", "0.2", *only)
        left_out = "too many like it were not answered in time"
        assert left_out in done.output, done.output

    @pytest.mark.parametrize(
        ("server", "message"),
        [
            ("sh -c 'echo no; exit 4' {address}", "ended with status 4: no"),
            ("sh -c 'kill -9 $$' {address}", "was killed: Killed"),
            ("/no/such/server {address}", "cannot run /no/such/server"),
            ("yes {address}", "was killed: File size limit exceeded"),
        ],
    )
    def test_a_server_that_does_not_start(
        self, server: str, message: str
    ) -> None:
        """It is said in one line, with the status 2."""
        done = run_kit("--server", server)
        assert (done.status, done.output) == (2, "")
        assert done.errors.startswith("conformance: ")
        assert message in done.errors and done.errors.count("\n") == 1

    @pytest.mark.parametrize(
        ("what", "message"),
        [
            ("time.sleep(99)", "No such file"),
            ("_ = listen(STREAM); time.sleep(99)", "wrong type for socket"),
            ("_ = listen(SEQPACKET); time.sleep(99)", "is not answered"),
            ("serve(lambda wire: wire.close())", "it closes each connection"),
            ("serve(lambda wire: wires.append(wire))", "is not answered"),
            ("serve(flood)", "receives MSG k\\0 without end"),
        ],
    )
    def test_a_server_that_does_not_serve(
        self, directory: Path, what: str, message: str
    ) -> None:
        """So is this, and nothing is waited for without end."""
        path = directory / "server.py"
        path.write_text(f"{USELESS}\n{what}\n", "utf-8")
        said = ""
        with ServerProcess(naive(path), 0.2) as server:
            for server.start_seconds_max in (0.5, 2.0, 8.0):  # if need be
                with pytest.raises(Failure) as failure:
                    server.start()
                said = str(failure.value)
                if message in said:
                    break
        assert message in said

    @pytest.mark.parametrize(
        "options",
        [
            ("--server", "true"),
            ("--server", "' {address}"),
            ("--server", "true {address}", "--seconds", "0"),
            ("--server", "true {address}", "--seconds", "soon"),
            ("--server", "true {address}", "--only", "SUBB"),
        ],
    )
    def test_wrong_usage(self, options: Sequence[str]) -> None:
        """It ends with the status 2, and nothing is run."""
        done = run_kit(*options)
        assert (done.status, done.output) == (2, "")
        assert "Traceback" not in done.errors

    @pytest.mark.parametrize(
        ("lines", "wrong"),
        [
            ("A > SUB k; A < no packet", ""),
            ("A > HELLO; A < no packet", ""),
            ("A > SUB k; A > MSG k\\0; A < no packet", "received MSG k\\0"),
            ("A > SUB k; A < end", "received nothing"),
            ("A > HELLO; A < nothing", "received the end"),
            ("A > HELLO", "received the end"),
            ("A > SUB k; B > MSG k\\0", "received MSG k\\0"),
            ("A > SUB k; B > MSG k\\0; A < MSG k\\0", ""),
            ("A > SUB k; B > MSG k\\0; A < MSG k", "received MSG k\\0"),
            ("A > SUB k; B > MSG k\\0.; A < MSG {any}.", ""),
            ("A > SUB k; B > MSG k\\0-; A < MSG {any}.", "received MSG k"),
            ("A > SUB k; B >> MSG k\\0{1..2}; A < MSG k\\0{1..2}", ""),
            ("A > SUB k; B >> MSG k\\0{1..2}; A < MSG k\\01", "received MSG"),
        ],
    )
    def test_conversation_is_complete_and_exact(
        self, lines: str, wrong: str
    ) -> None:
        """What is received and not said, or not as said, is a failure."""
        spoken = tuple(lines.split("; "))
        block = Block("conversation", "x", ("SUB-1",), spoken, "x.md")
        result = run_on_fake_kernel(*conversations(block))
        assert result.what.startswith(wrong), result
        assert bool(wrong) == (result.verdict == "failed"), result
        assert bool(wrong) != ("(the clients close)" in result.dialogue)

    @pytest.mark.parametrize(
        "line", ["A", "A > \\q", "A > {b.pid", "a > SUB k", "A room", "go"]
    )
    def test_step_that_is_none(self, line: str) -> None:
        """A slip in an example is not passed over."""
        block = Block("conversation", "x", ("SUB-1",), (line,), "x.md")
        with pytest.raises((ValueError, AssertionError)):
            list(conversations(block))

    def test_without_the_specification(self, directory: Path) -> None:
        """Nothing is run, and that is not a success."""
        copy = shutil.copytree(SPEC / "conformance", directory / "conformance")
        done = run(str(copy), "--server", naive())
        assert done.status == 2 and "no examples" in done.errors, done

    def test_the_folder_alone(self, directory: Path) -> None:
        """A copy of spec/ is all that an implementer needs."""
        copy = shutil.copytree(SPEC, directory / "spec")
        kit = copy / "conformance"
        arguments = (str(kit), "--server", naive(), "--only", "PUB-1")
        done = run(*arguments, cwd="/", env={})
        assert done.status == 0 and " passed, 0 failed" in done.output, done

    def test_only_the_standard_library_is_imported(self) -> None:
        """And the kit itself."""
        for file in (SPEC / "conformance").glob("*.py"):
            source = file.read_text("utf-8")
            imported = re.findall(r"^(?:from|import) (\w+)", source, re.M)
            if sys.version_info >= (3, 10):
                known = {*sys.stdlib_module_names, "conformance"}
                assert {*imported} <= known, file
