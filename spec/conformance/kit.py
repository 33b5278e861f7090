"""Which examples are run, and how each of them ended."""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple, Union

from . import (
    check_again,
    check_daemon,
    check_flood,
    check_log,
    check_process,
    check_random,
    check_secrets,
    check_traffic,
)
from .conversation import Failure, Outcome, perform
from .examples import Block, Case, blocks_of, read_cases
from .rules import ORIGINS, read_rules
from .server import ServerProcess, busy_time, delayed_seconds
from .trial import Check, NotApplicable, TooBusy, perform_check

Item = Union[Case, Check]  # what is run
MODULES = (
    check_random,
    check_process,
    check_daemon,
    check_traffic,
    check_flood,
    check_secrets,
    check_log,
    check_again,
)
REAL = Path(__file__).with_name("real_kernel.txt")
REAL_BLOCKS = (*blocks_of(REAL.read_text("utf-8"), REAL.name),)
REAL_CASES = read_cases(REAL_BLOCKS)
CHECKS = [
    check
    for module in MODULES
    for check in vars(module).values()
    if isinstance(check, Check)
]


class Result(NamedTuple):
    """How one case ended."""

    case: str
    rules: tuple[str, ...]  # first that which is broken, if that is known
    verdict: str  # one of report's VERDICTS
    what: str = ""  # went wrong, or why it was not run
    dialogue: tuple[str, ...] = ()  # up to the step that failed
    seconds: float = 0.0

    @property
    def block(self) -> str:
        """The name of the block that its case is of."""
        return self.case.partition("/")[0]

    @property
    def names(self) -> set[str]:
        """The names by which a file can have it fail."""
        return {self.case, self.block, *self.rules}


def not_offered(case: Item, without: Set[str]) -> str:
    """Return why a server need not keep what a case shows, if so."""
    names = without and names_of([case]) & without
    return f"see --without {min(names)}" if names else ""


def family_of(case: Item) -> str:
    """Return the family of the first rule that a case shows."""
    return read_rules()[case.rules[0]].family


def origin_of(case: Item) -> str:
    """Return the origin that is farthest from the text, of a case's rules."""
    rules = map(read_rules().__getitem__, case.rules)
    return max((rule.origin for rule in rules), key=ORIGINS.index)


LEVELS = ("protocol", "sbus", "daemon")


def scope_of(case: Item) -> str:
    """Return which of LEVELS asks for a case.

    The first is what the protocol text asks for, the second all of chapters 2
    to 8, the third chapter 9 and whatever needs an option of the server.
    """
    is_plain = (
        case.is_plain if isinstance(case, Check) else not options_of(case)
    )
    files = [read_rules()[rule].file for rule in case.rules]
    if not is_plain or any(file.startswith("9") for file in files):
        return "daemon"
    return "protocol" if origin_of(case) == "upstream" else "sbus"


def level_of(case: Item) -> str:
    """Return must, should, or choice: the weakest level of a case's rules."""
    levels = {read_rules()[rule].level for rule in case.rules}
    if "MAY" in levels:
        return "choice"
    return "should" if levels & {"SHOULD", "SHOULD NOT"} else "must"


OBSTACLES = {
    "room": "needs a kernel whose buffers can be set",
    "unknown-process": "needs a kernel that does not know a process",
    "root": "needs to be run by root",
}


def needs_of(case: Item) -> list[str]:
    """Return what a case needs that not every runner has."""
    if isinstance(case, Check):
        return ["fill"] if case.fills else []
    steps = case.conversation().steps
    verbs = {step.verb for step in steps}
    ids = [step.argument for step in steps if step.verb == "process"]
    needs = {
        "fill": "fill" in verbs,
        "room": "room" in verbs,
        "clock": "wait" in verbs,
        "unknown-process": any("pid=" in text for text in ids),
        "root": any("id=" in text and "pid=" not in text for text in ids),
    }
    return [kind for kind, is_so in needs.items() if is_so]


def obstacle(case: Item) -> str:
    """Return why a case cannot be run with a real server, if so."""
    for kind in needs_of(case):
        if kind in OBSTACLES and (kind != "root" or os.geteuid() != 0):
            return OBSTACLES[kind]
    return ""


def left_out(case: Item, level: str, only: Set[str]) -> str:
    """Return why a case is not asked for, if so.

    What is named is run whatever its level.
    """
    if only & {case.name, block_of(case), *case.rules}:
        return ""
    scope = scope_of(case)
    is_beyond = LEVELS.index(scope) > LEVELS.index(level)
    return f"it is of --level {scope}" if is_beyond else ""


SIGNAL = "a signal has ended the run"
NO_TIME = "what failed took too long; see --total"
TOO_BUSY = "this machine was too busy to tell a failure from a delay"
FAMILY_SHARE = 1 / 12  # of the time, for what fails of a family
CHECKS_SHARE = 1 / 2  # for checks, which come first; examples have the rest
LATE_PATIENCE = 1 / 4  # for its rest
PASSES_IF_FLAKY = 2  # in a row; fewer would hide what fails now and then
DELAY_SECONDS_MAX = 0.1  # of a kit that waits for a processor
MORE_TIME = (1, 2, 3, 3, 3)  # for tries after a delay
BUSY_SHARE_MIN = 3 / 4  # of their time; else they tell nothing
received: set[int] = set()  # signals; what is run is first run to its end


class Kit:
    """Runs cases against a server process."""

    def __init__(
        self,
        server: ServerProcess,
        level: str,
        total: float,
        only: Set[str] = frozenset(),
        tries_again: bool = False,
    ) -> None:
        self.server = server
        self.level = level
        self.only = only  # whose cases are run whatever their level
        self.tries_again = tries_again  # what fails, which may be flaky
        self.options: tuple[str, ...] | None = None  # of the running server
        self._refused: dict[tuple[str, ...], str] = {}  # options, and why
        self._room_fault: str | None = None  # None before it was tried
        self._total = total
        self._failing: dict[str, float] = defaultdict(float)  # by family

    def judge(self, case: Item) -> Result:
        """Run one case; one server does for those with the same options."""
        start, busy_start = time.monotonic(), busy_time()
        verdict, wrong, said, rule = self._outcome(case)
        rules = tuple(dict.fromkeys(filter(None, (rule, *case.rules))))
        seconds = round(time.monotonic() - start, 4)
        if verdict == "failed":
            self._failing[family_of(case)] += busy_time() - busy_start
        return Result(case.name, rules, verdict, wrong, tuple(said), seconds)

    def _outcome(self, case: Item) -> tuple[str, str, Sequence[str], str]:
        """Return the verdict on a case, and what else a result tells."""
        share = CHECKS_SHARE if isinstance(case, Check) else 1
        is_over = sum(self._failing.values()) > share * self._total
        for verdict, why in (
            ("not asked for", left_out(case, self.level, self.only)),
            ("not applicable", obstacle(case)),
            ("not run", SIGNAL if received else NO_TIME * is_over),
        ):
            if why:
                return verdict, why, (), ""
        bad = "differs" if level_of(case) == "choice" else "failed"
        try:
            before = delayed_seconds()
            is_late = self._is_late(case)
            with self.server.patience(LATE_PATIENCE if is_late else 1):
                first = self._try(case)
            delay = delayed_seconds() - before
            is_sure = is_late or not self.tries_again or first.is_sure
            if first.wrong and not is_sure:
                bad = self._verdict_again(case, delay) or bad
        except NotApplicable as error:
            return "not applicable", str(error), (), ""
        except TooBusy:
            return "not run", TOO_BUSY, (), ""
        if not first.wrong:
            return "passed", "", (), ""
        if bad == "not run":
            return bad, TOO_BUSY, (), ""
        return bad, first.wrong, first.said, first.rule

    def _is_late(self, case: Item) -> bool:
        """Return whether failures of a family took long.

        A server with one mistake may fail all its examples, and wait in each
        of them: so that others have their time, the rest is tried once.
        """
        seconds = self._failing[family_of(case)]
        return not self.only and seconds > FAMILY_SHARE * self._total

    def _verdict_again(self, case: Item, delay: float) -> str:
        """Return another verdict on a case that has failed, if so.

        Where the kit had to wait for a processor, so had the server: it gets
        more time, and need not pass each time.  Where it waited for much of
        that time too, it cannot tell whether a block time was kept.
        """
        if delay < DELAY_SECONDS_MAX:
            tries = (self._try(case) for _ in range(PASSES_IF_FLAKY))
            return "" if any(again.wrong for again in tries) else "flaky"
        start, busy_start = time.monotonic(), busy_time()
        for factor in MORE_TIME:
            self._room_fault = None  # it may have been learned too late
            with self.server.patience(factor):
                if not self._try(case).wrong:
                    return "flaky"
        share = (busy_time() - busy_start) / (time.monotonic() - start)
        is_timed = "clock" in needs_of(case)
        return "not run" if is_timed and share < BUSY_SHARE_MIN else ""

    def _try(self, case: Item) -> Outcome:
        """Run a case; one server does for those with the same options."""
        why = self.learn_room() if "fill" in needs_of(case) else ""
        if isinstance(case, Check):
            self.options = None  # a check leaves nothing as it was
        else:
            why = why or self.prepare(options_of(case))
        self.server.forget_words()  # about other examples
        if why:
            outcome = Outcome(why, [])
        elif isinstance(case, Check):
            outcome = perform_check(case, self.server)
        else:
            outcome = perform(self.server, case.conversation())
        if outcome.wrong:
            self.options = None  # a server that went wrong is not used again
            if self.server.log() not in outcome.wrong:
                for line in self.server.last_words():
                    outcome.said.append(f"(the server wrote: {line})")
        return outcome

    def learn_room(self) -> str:
        """Learn what a fill step takes; return why that fails, if so."""
        if self._room_fault is None:
            self._room_fault = self.prepare(())
            try:
                if not self._room_fault:
                    self.server.learn_room()
            except Failure as failure:
                self._room_fault = f"cannot fill a client: {failure}"
                self.options = None  # as after any failure
        return self._room_fault

    def prepare(self, options: tuple[str, ...]) -> str:
        """Have a server run; return why it does not, if so."""
        why = self._refused.get(()) or self._refused.get(options, "")
        if why or options == self.options:
            return why
        self.options = None
        try:
            self.server.start("", *options)
            with contextlib.suppress(OSError):  # other users may connect
                os.chmod(self.server.path, 0o777)
        except Failure as failure:
            head = f"with {' '.join(options)}: " if options else ""
            self._refused[options] = f"{head}{failure}"
            return self._refused[options]
        self.options = options
        return ""


def block_of(case: Any) -> str:
    """Return the name of the block that a case is of."""
    name: str = case.name
    return name.partition("/")[0]


def options_of(case: Item) -> tuple[str, ...]:
    """Return the options of the server that a case needs at its start."""
    return () if isinstance(case, Check) else case.conversation().options


def all_cases(blocks: tuple[Block, ...] = ()) -> list[Item]:
    """Return the cases of blocks, or all examples, our own, and checks.

    Those with the same options come together.
    """
    ours = () if blocks else (*REAL_CASES, *CHECKS)
    return sorted([*read_cases(blocks), *ours], key=options_of)


def names_of(cases: Iterable[Any]) -> set[str]:
    """Return the names by which cases can be asked for.

    They are their own, and those of their rules, families and chapters:
    5-flood-control, flood-control and 5 are one.
    """
    names, rules = set(), read_rules()
    for case in cases:
        names |= {case.name, block_of(case), *case.rules}
        for rule in map(rules.__getitem__, case.rules):
            chapter = Path(rule.file).stem
            names |= {rule.family, chapter, *chapter.split("-", 1)}
    return names


def choose(cases: Sequence[Any], only: set[str]) -> list[Any]:
    """Return the cases that have one of the names, all if none is named."""
    return [case for case in cases if not only or names_of([case]) & only]
