"""completion: teach a shell the commands and options of `sbus`."""

from __future__ import annotations

import argparse
import re

from sbus_client import (
    Options,
    argument,
    command,
    option_parsers,
    write,
)

BASH = """\
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
ZSH = """\
#compdef sbus
# Completion of sbus for zsh: sbus completion zsh >DIRECTORY_OF_FPATH/_sbus
local command= word before= all=
for word in ${words[2,CURRENT-1]}; do
    case $before:$word in
        -a:* | --address:* | *:-*) ;;
        *) command=$word; break ;;
    esac
    before=$word
done
case ${words[CURRENT - 1]} in
    -a | --address) _files; return ;;
esac
case $command in
%s
esac
compadd -- ${=all} || _files
"""
FISH = """\
# Completion of sbus for fish:
# sbus completion fish >~/.config/fish/completions/sbus.fish
%s
"""


def long_options(parser: argparse.ArgumentParser) -> str:
    """Return the long options of a parser, with spaces between."""
    option = r"^  (?:-\w(?: [A-Z]+)?, )?(--[a-z-]+)"
    return " ".join(re.findall(option, parser.format_help(), re.MULTILINE))


def cases(words: dict[str, str], variable: str) -> str:
    """Return what a shell says of each command, or of none."""
    return "\n".join(
        f"        {name or repr(name)}) {variable}={all_!r} ;;"
        for name, all_ in words.items()
    )


def fish_lines(words: dict[str, str]) -> str:
    """Return what fish is told of each command, or of none."""
    lines = []
    for name, all_ in words.items():
        where = f"__fish_seen_subcommand_from {name}"
        where = where if name else "__fish_use_subcommand"
        for word in all_.split():
            what = f"-l {word[2:]}" if word[0] == "-" else f"-a {word}"
            lines.append(f"complete -c sbus -n '{where}' {what}")
    return "\n".join(lines)


SHELLS = {
    "bash": lambda words: BASH % cases(words, "words"),
    "zsh": lambda words: ZSH % cases(words, "all"),
    "fish": lambda words: FISH % fish_lines(words),
}


@command(
    "completion bash >~/.local/share/bash-completion/completions/sbus",
    argument("shell", choices=[*SHELLS], help="the shell"),
    has_address=False,
)
def completion(options: Options) -> None:
    """Print the completion of this command line for a shell."""
    from .command_line import all_commands

    parser, commands = option_parsers(all_commands())
    words = {"": f"{' '.join(commands)} {long_options(parser)}"}
    words.update((name, long_options(each)) for name, each in commands.items())
    words["completion"] += f" {' '.join(SHELLS)}"
    write(SHELLS[options.shell](words).encode("ascii"))
