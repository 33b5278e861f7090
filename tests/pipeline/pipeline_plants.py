"""Breaches to plant into a trace, one of each kind that an audit can name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Callable

from pipeline_paper import Event, find


def victim(events: Sequence[Event]) -> int:
    """Return who was sent the most, asked for nothing, and has no secret."""
    asked = {
        events[at]["c"]
        for at in find(events, ev="ctl")
        if not events[at]["key"].startswith("!")
    }
    asked |= {
        events[at]["c"]
        for at in find(events, ev="sub")
        if events[at]["pattern"].startswith("!")
    }
    sent = Counter[int](events[at]["c"] for at in find(events, ev="send"))
    return max(sent.keys() - asked, key=sent.__getitem__)


def sends(events: Sequence[Event]) -> list[int]:
    """Return where public messages of others are sent to the victim."""
    c = victim(events)
    public = {
        events[at]["m"]
        for at in find(events, ev="msg")
        if not events[at]["key"].startswith("!") and events[at]["c"] != c
    }
    return [
        at for at in find(events, ev="send", c=c) if events[at]["m"] in public
    ]


def give(events: list[Event], is_secret: bool) -> None:
    """Send the victim a message that it is not to have."""
    c = victim(events)
    had = {events[at]["m"] for at in find(events, c=c) if "m" in events[at]}
    ours = [events[at]["m"] for at in sends(events)]
    others = [
        at
        for at in find(events, ev="msg")
        if events[at]["m"] not in had
        and min(ours) < events[at]["m"] < max(ours)
        if events[at]["key"].startswith("!") == is_secret
    ]
    at = others[len(others) // 2]
    event = {"t": 1, "ev": "send", "m": events[at]["m"], "c": c}
    events.insert(at + 1, event)


def misdeliver(events: list[Event]) -> None:
    give(events, is_secret=False)


def leak(events: list[Event]) -> None:
    give(events, is_secret=True)


def lose(events: list[Event]) -> None:
    del events[sends(events)[2]]


def double(events: list[Event]) -> None:
    at = sends(events)[3]
    events.insert(at + 1, dict(events[at]))


def swap(events: list[Event]) -> None:
    """Send a message after the next one of the same publisher."""
    publisher = {
        events[at]["m"]: events[at]["c"] for at in find(events, ev="msg")
    }
    ours = sends(events)
    for at, other in zip(ours[3:], ours[4:]):
        if publisher[events[at]["m"]] == publisher[events[other]["m"]]:
            events.insert(other, events.pop(at))
            return
    raise AssertionError("no two messages of one publisher in a row")


def drop(events: list[Event], reason: str) -> None:
    at = sends(events)[3]
    events[at] = {**events[at], "ev": "drop", "reason": reason}


def drop_unasked(events: list[Event]) -> None:
    drop(events, "soft/discard")


def hear_again(events: list[Event]) -> None:
    drop(events, "deaf")


def last_sends(events: Sequence[Event]) -> list[int]:
    """Return where the victim is sent its last two messages."""
    return find(events, ev="send", c=victim(events))[-2:]


def lose_last(events: list[Event]) -> None:
    """Lose the last message of a client, which hears no more."""
    del events[last_sends(events)[-1]]


def lose_before_deaf(events: list[Event]) -> None:
    """Lose a message that came before one that is dropped."""
    at, last = last_sends(events)
    events[last] = {**events[last], "ev": "drop", "reason": "deaf"}
    del events[at]


def drop_twice(events: list[Event]) -> None:
    at = last_sends(events)[-1]
    events[at] = {**events[at], "ev": "drop", "reason": "deaf"}
    events.insert(at, dict(events[at]))


def drop_after_close(events: list[Event]) -> None:
    sent = events.pop(last_sends(events)[-1])
    event = {**sent, "ev": "drop", "reason": "deaf"}
    at = find(events, ev="close", c=event["c"])[0]
    events.insert(at + 1, event)


def drop_unknown(events: list[Event]) -> None:
    drop(events, "lost")


def hear_older(events: list[Event]) -> None:
    """Send a client that is deaf a message older than what was dropped."""
    at, last = last_sends(events)
    events[last] = {**events[last], "ev": "drop", "reason": "deaf"}
    events.insert(last, events.pop(at))


def leave_open(events: list[Event]) -> None:
    """Have no close before the stop."""
    del events[find(events, ev="close", c=victim(events))[0]]


def send_unpublished(events: list[Event]) -> None:
    at = sends(events)[3]
    events.insert(at + 1, {**events[at], "m": 0})


def triple(events: list[Event]) -> None:
    """Send a message three times: an odd number, as once is."""
    double(events)
    double(events)


def mix_up(events: list[Event]) -> None:
    """Send a message to another client, as many as it was owed to."""
    for at in sends(events):
        m = events[at]["m"]
        had = {event["c"] for event in events if event.get("m") == m}
        for later in find(events[at:], ev="send"):
            event = events[at + later]
            if event["m"] > m and event["c"] not in had:
                events[at] = {**events[at], "c": event["c"]}
                return
    raise AssertionError("everybody had everything")


def soft_sends(events: Sequence[Event]) -> list[int]:
    """Return where a client that asked for soft/discard is sent messages."""
    asked = find(events, ev="ctl", key="blocking/soft/discard")[0]
    found = find(events, ev="send", c=events[asked]["c"])
    return [at for at in found if at > asked]


def drop_sent(events: list[Event]) -> None:
    at = soft_sends(events)[1]
    event = {**events[at], "ev": "drop", "reason": "soft/discard"}
    events.insert(at + 1, event)


def drop_unowed(events: list[Event]) -> None:
    at = soft_sends(events)[-1]
    c = events[at]["c"]
    had = {events[at]["m"] for at in find(events, c=c) if "m" in events[at]}
    before = reversed(find(events[:at], ev="msg"))
    m = next(events[at]["m"] for at in before if events[at]["m"] not in had)
    event = {**events[at], "ev": "drop", "m": m, "reason": "soft/discard"}
    events.insert(at + 1, event)


def publish_again(events: list[Event]) -> None:
    at = find(events, ev="msg")[5]
    events.insert(at + 1, dict(events[at]))


def send_too_early(events: list[Event]) -> None:
    """Send a message before it is published, and after those before it."""
    for at in sends(events):
        event = events[at]
        published = find(events, ev="msg", m=event["m"])[0]
        if not find(events[published:at], ev="send", c=event["c"]):
            events.insert(published, events.pop(at))
            return
    raise AssertionError("everything had to wait")


def open_again(events: list[Event]) -> None:
    at = find(events, ev="open", c=victim(events))[0]
    events.insert(at + 1, dict(events[at]))


def act_before_open(events: list[Event]) -> None:
    at, after = find(events, c=victim(events))[:2]
    events.insert(after, events.pop(at))


def close_again(events: list[Event]) -> None:
    at = find(events, ev="close")[0]
    events.insert(at + 1, dict(events[at]))


def act_after_close(events: list[Event]) -> None:
    at = find(events, ev="close")[0]
    events.insert(at + 1, {**events[at], "ev": "sub", "pattern": "q"})


def unsubscribe_unheld(events: list[Event]) -> None:
    at = find(events, ev="sub", c=victim(events))[0]
    event = {**events[at], "ev": "unsub", "pattern": "q"}
    events.insert(at + 1, event)


def stop_early(events: list[Event]) -> None:
    events.insert(len(events) // 2, dict(events[-1]))


def start_again(events: list[Event]) -> None:
    events.insert(len(events) // 2, dict(events[0]))


PLANTED: dict[Callable[[list[Event]], None], str] = {
    lose: "missing",
    lose_last: "missing",
    lose_before_deaf: "missing",
    misdeliver: "unowed",
    mix_up: "missing unowed",
    leak: "secret-leak",
    double: "duplicate",
    triple: "duplicate",
    swap: "out-of-order",
    drop_unasked: "bad-drop",
    drop_sent: "bad-drop",
    drop_unowed: "bad-drop",
    drop_twice: "bad-drop",
    drop_unknown: "bad-drop",
    hear_again: "bad-drop",
    hear_older: "bad-drop",
    send_unpublished: "bad-trace",
    send_too_early: "bad-trace",
    publish_again: "bad-trace",
    open_again: "bad-trace",
    act_before_open: "bad-trace",
    close_again: "bad-trace",
    leave_open: "bad-trace",
    drop_after_close: "bad-trace",
    act_after_close: "bad-trace",
    unsubscribe_unheld: "bad-trace",
    stop_early: "bad-trace",
    start_again: "bad-trace bad-trace",  # no event, and a gap
}
