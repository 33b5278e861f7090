"""completion: teach a shell the commands and options of `sbus`."""

from __future__ import annotations

import argparse
import re

from sbus_client import Command, Options, argument, write

COMPLETION = """\
# Completion of sbus for bash: source <(sbus completion bash)
_sbus() {
    local i command= words=
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${COMP_WORDS[i - 1]}:${COMP_WORDS[i]} in
            -a:* | --address:* | =:* | *:=* | *:-*) ;;
            *) command=${COMP_WORDS[i]}; break ;;
        esac
    done
    case ${COMP_WORDS[COMP_CWORD - 1]} in
        -a | --address | =) return ;;  # a file's name
    esac
    case $command in
%s
    esac
    COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _sbus sbus
"""


def long_options(parser: argparse.ArgumentParser) -> str:
    """Return the long options of a parser, with spaces between."""
    option = r"^  (?:-\w(?: [A-Z]+)?, )?(--[a-z-]+)"
    return " ".join(re.findall(option, parser.format_help(), re.MULTILINE))


def completion(_: Options) -> None:
    """Print what teaches bash to complete this command line."""
    from .command_line import option_parsers

    parser, commands = option_parsers()
    words = {"''": f"{' '.join(commands)} {long_options(parser)}"}
    words.update((name, long_options(each)) for name, each in commands.items())
    words["completion"] += " bash"
    cases = (
        f'        {name}) words="{all_}" ;;' for name, all_ in words.items()
    )
    write((COMPLETION % "\n".join(cases)).encode("ascii"))


COMPLETION_HELP = """
Print the completion of this command line for a shell.
"""

COMMAND = Command(
    completion,
    "print completion for a shell",
    COMPLETION_HELP,
    "completion bash >~/.local/share/bash-completion/completions/sbus",
    (argument("shell", choices=["bash"], help="the shell"),),
    has_address=False,
)
