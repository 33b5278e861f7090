"""Which examples are run, and how each of them ended."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from .conversation import Failure, perform
from .examples import Case, Conversation, read_cases
from .rules import SPEC, Rule, read_rules
from .server import ServerProcess


class Result(NamedTuple):
    """How one case ended."""

    case: str
    rules: tuple[str, ...]
    verdict: str  # passed, failed, or not applicable
    what: str = ""  # went wrong, or why it is not applicable
    dialogue: tuple[str, ...] = ()  # up to the step that failed


def origin_of(case: Case, rules: dict[str, Rule]) -> str:
    """Return whether upstream's rules alone ask for what a case shows."""
    ours = any(rules[rule].origin == "ours" for rule in case.rules)
    return "ours" if ours else "upstream"


def level_of(case: Case, rules: dict[str, Rule]) -> str:
    """Return must, should, or choice: the weakest level of a case's rules."""
    levels = {rules[rule].level for rule in case.rules}
    if "MAY" in levels:
        return "choice"
    return "should" if levels & {"SHOULD", "SHOULD NOT"} else "must"


OBSTACLES = {
    "room": "needs a kernel whose buffers can be set",
    "unknown-process": "needs a kernel that does not know a process",
    "root": "needs to be run by root",
}


NEEDS = ("fill", "room", "clock", "unknown-process", "root")


def needs_of(conversation: Conversation) -> list[str]:
    """Return what a conversation needs that not every runner has."""
    kinds = set()
    for step in conversation.steps:
        if step.verb in ("fill", "room"):
            kinds.add(step.verb)
        elif step.verb == "wait":
            kinds.add("clock")
        elif "pid=" in step.argument and step.verb == "process":
            kinds.add("unknown-process")
        elif "id=" in step.argument and step.verb == "process":
            kinds.add("root")
    return [kind for kind in NEEDS if kind in kinds]


def obstacle(conversation: Conversation) -> str:
    """Return why a conversation cannot be held with a real server, if so."""
    for kind in needs_of(conversation):
        if kind in OBSTACLES and (kind != "root" or os.geteuid() != 0):
            return OBSTACLES[kind]
    return ""


ANSWERS_MAX = 10  # so many times the longest, for the failures of a block


class Kit:
    """Runs cases against a server process."""

    def __init__(
        self, server: ServerProcess, ours: bool, choices: bool
    ) -> None:
        self.server = server
        self.ours = ours
        self.choices = choices
        self.rules = read_rules()
        self._options: tuple[str, ...] | None = None  # of the running server
        self._refused: dict[tuple[str, ...], str] = {}  # options, and why
        self._room_fault: str | None = None  # None before it was tried
        # How many seconds the failures of each block have taken
        self._slow: dict[str, float] = defaultdict(float)

    def run(self, cases: Iterable[Case]) -> list[Result]:
        """Run cases; return results in the same order.

        Those that need the same options are run by one server.
        """
        cases = list(cases)
        results = {
            case.name: self.judge(case)
            for case in sorted(cases, key=lambda one: options_of(one))
        }
        return [results[case.name] for case in cases]

    def judge(self, case: Case) -> Result:
        """Run one case."""
        conversation = case.conversation()
        why = self.left_out(case) or obstacle(conversation)
        if not why and "fill" in needs_of(conversation):
            why = self.learn_room()
        why = why or self.prepare(conversation.options)
        if why:
            return Result(case.name, case.rules, "not applicable", why)
        start = time.monotonic()
        wrong, said = perform(self.server, conversation)
        if not wrong:
            return Result(case.name, case.rules, "passed")
        self._options = None  # a server that went wrong is not used again
        self._slow[block_of(case)] += time.monotonic() - start
        return Result(case.name, case.rules, "failed", wrong, tuple(said))

    def left_out(self, case: Case) -> str:
        """Return why a case was not asked for, if so."""
        if not self.ours and origin_of(case, self.rules) == "ours":
            return "not asked for by the original protocol; see --ours"
        if not self.ours and options_of(case):
            return "needs an option of the reference server; see --ours"
        if not self.choices and level_of(case, self.rules) == "choice":
            return "a server may choose; see --choices"
        if self._slow[block_of(case)] > ANSWERS_MAX * self.server.seconds_max:
            return "too many like it were not answered in time"
        return ""

    def learn_room(self) -> str:
        """Learn what a fill step takes; return why that fails, if so."""
        if self._room_fault is None:
            self._room_fault = self.prepare(())
            try:
                if not self._room_fault:
                    self.server.learn_room()
            except Failure as failure:
                self._room_fault = f"cannot fill a client: {failure}"
                self._options = None  # as after any failure
        return self._room_fault

    def prepare(self, options: tuple[str, ...]) -> str:
        """Have a server run; return why it does not, if so."""
        why = self._refused.get(()) or self._refused.get(options, "")
        if why or options == self._options:
            return why
        self._options = None
        try:
            self.server.start(options)
        except Failure as failure:
            head = f"with {' '.join(options)}: " if options else ""
            self._refused[options] = f"{head}{failure}"
            return self._refused[options]
        self._options = options
        return ""


def block_of(case: Case) -> str:
    """Return the name of the block that a case is of."""
    return case.name.partition("/")[0]


def options_of(case: Case) -> tuple[str, ...]:
    """Return the options of the server that a case needs."""
    return case.conversation().options


def names_of(case: Case) -> set[str]:
    """Return the names by which a case can be asked for."""
    families = {rule.partition("-")[0] for rule in case.rules}
    return {case.name, block_of(case), *case.rules, *families}


def choose(only: set[str]) -> list[Case]:
    """Return the cases that are asked for, all if none is named.

    Raises: Failure if there are no examples, or none with one of the names.
    """
    cases = read_cases()
    if not cases:
        raise Failure(f"there are no examples in {SPEC}")
    unknown = only - {name for case in cases for name in names_of(case)}
    if unknown:
        raise Failure(f"no example of {', '.join(sorted(unknown))}")
    return [case for case in cases if not only or names_of(case) & only]
