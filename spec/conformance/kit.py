"""Which examples are run, and how each of them ended."""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Callable, NamedTuple, Protocol, TypeVar, Union

from .checks import CHECKS
from .conversation import Failure, perform
from .examples import Case, read_cases
from .rules import ORIGINS, SPEC, Rule, read_rules
from .server import ServerProcess
from .trial import Check, NotApplicable, perform_check

Item = Union[Case, Check]  # what is run


class Named(Protocol):
    """Whatever has a name, and shows rules."""

    @property
    def name(self) -> str:
        """The name, with a block's before the first '/'."""

    @property
    def rules(self) -> tuple[str, ...]:
        """The ids of the rules."""


SomeNamed = TypeVar("SomeNamed", bound=Named)


class Result(NamedTuple):
    """How one case ended."""

    case: str
    rules: tuple[str, ...]
    verdict: str  # one of report's VERDICTS
    what: str = ""  # went wrong, or why it was not run
    dialogue: tuple[str, ...] = ()  # up to the step that failed


def origin_of(case: Item, rules: dict[str, Rule]) -> str:
    """Return the origin that is farthest from the text, of a case's rules."""
    return max((rules[one].origin for one in case.rules), key=ORIGINS.index)


def level_of(case: Item, rules: dict[str, Rule]) -> str:
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


def needs_of(case: Item) -> list[str]:
    """Return what a case needs that not every runner has."""
    if isinstance(case, Check):
        return ["fill"] if case.fills else []
    kinds = set()
    for step in case.conversation().steps:
        if step.verb in ("fill", "room"):
            kinds.add(step.verb)
        elif step.verb == "wait":
            kinds.add("clock")
        elif "pid=" in step.argument and step.verb == "process":
            kinds.add("unknown-process")
        elif "id=" in step.argument and step.verb == "process":
            kinds.add("root")
    return [kind for kind in NEEDS if kind in kinds]


def obstacle(case: Item) -> str:
    """Return why a case cannot be run with a real server, if so."""
    for kind in needs_of(case):
        if kind in OBSTACLES and (kind != "root" or os.geteuid() != 0):
            return OBSTACLES[kind]
    return ""


NO_TIME = "there was no time left; see --total"
IGNORES_OPTIONS = "the server ignores options that it does not know"
ANSWERS_MAX = 10  # so many times the longest, for the failures of a block


class Kit:
    """Runs cases against a server process."""

    def __init__(
        self,
        server: ServerProcess,
        ours: bool,
        choices: bool,
        total_seconds_max: float = math.inf,
    ) -> None:
        self.server = server
        self.end = time.monotonic() + total_seconds_max
        self.ours = ours
        self.choices = choices
        self.rules = read_rules()
        self._options: tuple[str, ...] | None = None  # of the running server
        self._refused: dict[tuple[str, ...], str] = {}  # options, and why
        self._ignores_options: bool | None = None  # None before it was tried
        self._room_fault: str | None = None  # None before it was tried
        # How many seconds the failures of each block have taken
        self._slow: dict[str, float] = defaultdict(float)

    def run(
        self,
        cases: Iterable[Item],
        tell: Callable[[str, int], None] = lambda name, left: None,
    ) -> list[Result]:
        """Run cases; return results in the same order.

        Those that need the same options are run by one server.  Before each,
        its name is told, and how many are left.
        """
        cases = list(cases)
        results: dict[str, Result] = {}
        for case in sorted(cases, key=options_of):
            tell(case.name, len(cases) - len(results))
            results[case.name] = self.judge(case)
        return [results[case.name] for case in cases]

    def judge(self, case: Item) -> Result:
        """Run one case."""
        for verdict, why in (
            ("not asked for", self.left_out(case)),
            ("not applicable", obstacle(case)),
            ("not run", self.too_late(case)),
        ):
            if why:
                return Result(case.name, case.rules, verdict, why)
        why = self.learn_room() if "fill" in needs_of(case) else ""
        why = why or self.prepare(options_of(case))
        if why:
            return self.refused(case, why)
        start = time.monotonic()
        try:
            wrong, said = self.perform(case)
        except NotApplicable as obstacle_found:
            why = str(obstacle_found)
            return Result(case.name, case.rules, "not applicable", why)
        if not wrong:
            return Result(case.name, case.rules, "passed")
        self._options = None  # a server that went wrong is not used again
        self._slow[block_of(case)] += time.monotonic() - start
        return self.wrong(case, wrong, tuple(said))

    def wrong(
        self, case: Item, what: str, said: tuple[str, ...] = ()
    ) -> Result:
        """Return the result of a case that did not end as it says."""
        is_choice = level_of(case, self.rules) == "choice"
        verdict = "differs" if is_choice else "failed"
        return Result(case.name, case.rules, verdict, what, said)

    def refused(self, case: Item, why: str) -> Result:
        """Return the result of a case for which no server could be had.

        Our rules name the options, so that is wrong where these are run.
        """
        if not self.ours:
            return Result(case.name, case.rules, "not applicable", why)
        if why == IGNORES_OPTIONS:  # and thus answers no wrong one
            rules = ("RUN-1", *case.rules)
            return Result(case.name, rules, "failed", why)
        return self.wrong(case, why)

    def perform(self, case: Item) -> tuple[str, list[str]]:
        """Hold the conversation of a case, or make a check."""
        if not isinstance(case, Check):
            return perform(self.server, case.conversation())
        self._options = None  # nor is one that a check has had
        return perform_check(case, self.server)

    def left_out(self, case: Item) -> str:
        """Return why a case was not asked for, if so."""
        if not self.ours and origin_of(case, self.rules) != "upstream":
            return "the original protocol does not ask for it; see --ours"
        if not self.ours and options_of(case) and not isinstance(case, Check):
            return "needs an option of the reference server; see --ours"
        if not self.choices and level_of(case, self.rules) == "choice":
            return "a server may choose; see --choices"
        return ""

    def too_late(self, case: Item) -> str:
        """Return why there is no time for a case, if so."""
        if time.monotonic() > self.end:
            return NO_TIME
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
        if options and self.ignores_options():
            return IGNORES_OPTIONS
        self._options = None
        try:
            self.server.start(options)
            self.server.open_to_all()
        except Failure as failure:
            head = f"with {' '.join(options)}: " if options else ""
            self._refused[options] = f"{head}{failure}"
            return self._refused[options]
        self._options = options
        return ""

    def ignores_options(self) -> bool:
        """Return whether the server starts with an option that is none."""
        if self._ignores_options is None:
            self._options = None
            try:
                self.server.start(("--no-such-option",))
                self._ignores_options = True
            except Failure:
                self._ignores_options = False
        return self._ignores_options


def block_of(case: Named) -> str:
    """Return the name of the block that a case is of."""
    return case.name.partition("/")[0]


def options_of(case: Item) -> tuple[str, ...]:
    """Return the options of the server that a case needs."""
    if isinstance(case, Check):
        return case.options
    return case.conversation().options


def all_cases() -> list[Item]:
    """Return what all examples say, and the checks.

    Raises: Failure if there are no examples.
    """
    cases = read_cases()
    if not cases:
        raise Failure(f"there are no examples in {SPEC}")
    return [*cases, *CHECKS]


def names_of(case: Named, rules: dict[str, Rule]) -> set[str]:
    """Return the names by which a case can be asked for.

    They are its own, and those of its rules, their families and chapters:
    5-flood-control, flood-control and 5 are one.
    """
    families = {rules[rule].family for rule in case.rules}
    chapters = {Path(rules[rule].file).stem for rule in case.rules}
    parts = {part for one in chapters for part in one.split("-", 1)}
    own = {case.name, block_of(case)}
    return {*own, *case.rules, *families, *chapters, *parts}


def choose(cases: Sequence[SomeNamed], only: set[str]) -> list[SomeNamed]:
    """Return the cases that have one of the names, all if none is named."""
    rules = read_rules()
    return [case for case in cases if not only or names_of(case, rules) & only]


def refuse_unknown(cases: Sequence[Named], only: set[str]) -> None:
    """Let each of the names be one of a case.  Raises: Failure."""
    rules = read_rules()
    unknown = only.difference(*[names_of(case, rules) for case in cases])
    if unknown:
        raise Failure(f"no example of {', '.join(sorted(unknown))}")
