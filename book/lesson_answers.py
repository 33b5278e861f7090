"""Answers to the questions of the lessons.

Pages show the first right one, and tests try all of them.
"""

from __future__ import annotations

ANSWERS = {  # to each: right ones, wrong ones
    "temperatures": (
        ["sensors/*/temp", "*/*/temp"],
        ["sensors/", "sensors/*", "sensors/1/temp", ""],
    ),
    "all-below": (["sensors/"], ["sensors/*", "sensors", "*/"]),
    "empty-run": (["MSG a/\\0two"], ["MSG a/b/c\\0one", "nothing", "end"]),
    "who-hears": (["B C", "C, B"], ["A B C", "C", ""]),
    "one-left": (["MSG k\\0one"], ["nothing"]),
    "stop-hearing": (["UNSUB a/*"], ["UNSUB a/c", "UNSUB a/", "SUB a/b"]),
    "who-hears-the-secret": (["A"], ["A C", "B", "", "A B"]),
    "own-inbox": (
        ["!/cred////inbox", "!/cred////"],
        ["*/", "inbox", "!/cred/*/*/*/inbox"],
    ),
    "wrong-number": (["end", "the end", "The end."], ["nothing", "MSG x\\0"]),
    "after-a-gap": (["MSG k\\0three"], ["MSG k\\0two", "nothing", "{any}"]),
    "newest-first": (
        ["CMSG order/stack"],
        ["CMSG order/queue", "CMSG order/random"],
    ),
    "hold-up": (
        ["CMSG blocking/soft/block"],
        ["CMSG blocking/soft/queue", "CMSG blocking/hard/block"],
    ),
    "who-hears-the-chat": (["B"], ["A B", "A", ""]),
    "better-bridge": (["CMSG echo/off"], ["CMSG echo/on", "UNSUB news"]),
    "inbox-behind-a-bridge": (
        ["!/cred/100/1001/7/!/cred////inbox"],
        ["!/cred////inbox", "inbox"],
    ),
    "who-is-disconnected": (["B"], ["A", "A B", ""]),
    "what-frees-the-other": (["MSG b\\0one"], ["MSG b\\0two", "nothing"]),
    "let-the-other-go": (
        ["CMSG blocking/soft/queue", "CMSG blocking/soft/discard"],
        ["CMSG blocking/hard/discard", "CMSG order/stack", "UNSUB a"],
    ),
}
