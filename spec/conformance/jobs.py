"""Several servers at once, each judged by a process of its own."""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.util import Finalize
from typing import Any, Callable

from .clients import ClientCase
from .kit import Result, needs_of, options_of
from .trial import Check

PR_SET_PDEATHSIG = 1  # the signal when the kit itself is killed
SHARE_MAX = 50  # quick cases, which a process judges in one go
Judge = Callable[[Any], Result]
Make = Callable[[], tuple[Any, Judge]]  # what is left in the end, and a judge
Numbered = tuple[int, Result]  # by the number of its case
_mine: list[Any] = []  # of a process: its judge, and all cases


def judge_all(
    make: Make, cases: Sequence[Any], asked: Iterable[int], count: int
) -> Iterator[Numbered]:
    """Yield the results of the cases asked for, from so many processes."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(count, context, _begin, (make, cases)) as pool:
        shares = shares_of(cases, asked)
        for future in as_completed([pool.submit(_judge, s) for s in shares]):
            yield from future.result()


def _begin(make: Make, cases: Sequence[Any]) -> None:
    """Make what a process needs, until it ends."""
    context, judge = make()
    context.__enter__()
    Finalize(None, context.__exit__, (None, None, None), exitpriority=0)

    def end(*_: object) -> None:
        context.__exit__(None, None, None)
        os._exit(1)

    signal.signal(signal.SIGQUIT, end)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGQUIT)
    _mine[:] = judge, cases


def _judge(numbers: list[int]) -> list[Numbered]:
    """Return the results of some cases."""
    judge, cases = _mine
    return [(number, judge(cases[number])) for number in numbers]


def shares_of(cases: Sequence[Any], asked: Iterable[int]) -> list[list[int]]:
    """Return the numbers of cases in shares: slow cases first and alone.

    The others need one server, if they have the same options.
    """

    def is_slow(number: int) -> bool:
        case = cases[number]
        is_quick = not isinstance(case, (Check, ClientCase))
        return not is_quick or "clock" in needs_of(case)

    shares = [[number] for number in asked if is_slow(number)]
    quick = itertools.filterfalse(is_slow, asked)
    alike = itertools.groupby(quick, lambda number: options_of(cases[number]))
    for group in [[*group] for _, group in alike]:
        starts = range(0, len(group), SHARE_MAX)
        shares += [group[start : start + SHARE_MAX] for start in starts]
    return shares
