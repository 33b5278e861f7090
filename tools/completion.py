"""completion: teach a shell the commands and options of `sbus`.

The shells ask the command itself what may come next.  What each of them needs
for that is a file beside this one.
"""

from __future__ import annotations

import os

from . import shared

SHELLS = ["bash", "zsh", "fish"]


@shared.command(
    "completion bash >~/.local/share/bash-completion/completions/sbus",
    shared.argument(
        "shell", "or `words`", choices=[*SHELLS, "words"], nargs="?"
    ),
    shared.argument("words", "of a line", metavar="[WORD]", nargs="..."),
    has_address=False,
)
def completion(options: shared.Options) -> None:
    """Print the completion of sbus for a shell.

    With `words`, print what may come behind the WORDs of a line.
    """
    if not options.shell:
        raise shared.UsageError("name a shell: bash, zsh or fish")
    if options.shell == "words":
        words = [f"{word}\n" for word in following(options.words)]
        return shared.write("".join(words).encode("ascii"))
    script = f"{os.path.splitext(__file__)[0]}.{options.shell}"
    with open(script, "rb") as file:
        shared.write(file.read())


def following(words: list[str]) -> list[str]:
    """Return what may come after some words; nothing where a file may."""
    from .command_line import COMMANDS, all_commands, command_of

    if words[-1:] in (["-a"], ["--address"], ["="]):
        return []
    name = command_of(words)
    known = all_commands([name] if name in COMMANDS else [])
    parser, parsers = shared.option_parsers(known)
    more = {"help": COMMANDS, "completion": SHELLS}
    options = parsers.get(name, parser).long_options()
    return more.get(name, [] if name else COMMANDS) + options
