"""Several servers at once, each judged by a process of its own."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.util import Finalize
from typing import Any, Callable

from .kit import LATER, Result, needs_of, options_of
from .trial import Check

SHARE_MAX = 50  # quick cases, which a process judges in one go
Judge = Callable[[Any, bool], Result]
Make = Callable[[], tuple[Any, Judge]]  # what is left in the end, and a judge
Numbered = tuple[int, Result]  # by the number of its case
_mine: list[Any] = []  # of a process: its judge, and all cases


def judge_all(
    make: Make, cases: Sequence[Any], count: int
) -> Iterator[Numbered]:
    """Yield the results of cases, from so many processes.

    One process takes the cases in their order.  What a judge leaves for later
    is judged in the end.
    """
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(count, context, _begin, (make, cases)) as pool:
        in_order = [[number] for number in range(len(cases))]
        shares = shares_of(cases) if count > 1 else in_order
        is_last = False
        while shares:
            futures = [pool.submit(_judge, one, is_last) for one in shares]
            shares = []
            for future in as_completed(futures) if count > 1 else futures:
                for number, result in future.result():
                    if result.what == LATER:
                        shares.append([number])
                    else:
                        yield number, result
            is_last = True


def _begin(make: Make, cases: Sequence[Any]) -> None:
    """Make what a process needs, until it ends."""
    context, judge = make()
    context.__enter__()
    Finalize(None, context.__exit__, (None, None, None), exitpriority=0)
    _mine[:] = judge, cases


def _judge(numbers: list[int], is_last: bool) -> list[Numbered]:
    """Return the results of some cases."""
    judge, cases = _mine
    return [(number, judge(cases[number], is_last)) for number in numbers]


def shares_of(cases: Sequence[Any]) -> list[list[int]]:
    """Return the numbers of cases in shares: slow cases first and alone.

    The others need one server, if they have the same options.
    """

    def is_slow(number: int) -> bool:
        case = cases[number]
        return isinstance(case, Check) or "clock" in needs_of(case)

    numbers = range(len(cases))
    shares = [[number] for number in filter(is_slow, numbers)]
    quick = itertools.filterfalse(is_slow, numbers)
    alike = itertools.groupby(quick, lambda number: options_of(cases[number]))
    for group in [[*group] for _, group in alike]:
        starts = range(0, len(group), SHARE_MAX)
        shares += [group[start : start + SHARE_MAX] for start in starts]
    return shares
