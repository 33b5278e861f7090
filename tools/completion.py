"""completion: teach a shell the commands and options of `sbus`.

The shells ask the command itself what may come next.
"""

from __future__ import annotations

from . import shared

SHELLS = {
    "bash": """\
# Completion of sbus for bash: source <(sbus completion bash)
_sbus() {
    local before=("${COMP_WORDS[@]:1:COMP_CWORD-1}")
    local words=$("$1" completion words "${before[@]}" 2>/dev/null)
    COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _sbus sbus
""",
    "zsh": """\
#compdef sbus
# Completion of sbus for zsh: sbus completion zsh >DIRECTORY_OF_FPATH/_sbus
local before=("${(@Q)words[2,CURRENT-1]}")
compadd -- $($words[1] completion words $before 2>/dev/null) || _files
""",
    "fish": """\
# Completion of sbus for fish:
# sbus completion fish >~/.config/fish/completions/sbus.fish
function __sbus
    set -l words (commandline -opc)
    $words[1] completion words $words[2..] 2>/dev/null
end
complete -c sbus -a '(__sbus)'
""",
}


@shared.command(
    "completion bash >~/.local/share/bash-completion/completions/sbus",
    shared.argument(
        "shell",
        "the shell; or with `words`, what may come after the WORDs",
        choices=[*SHELLS, "words"],
    ),
    shared.argument("words", "of a line", metavar="WORD", nargs="..."),
    has_address=False,
)
def completion(options: shared.Options) -> None:
    """Print the completion of sbus for a shell."""
    words = [SHELLS.get(options.shell, "")]
    if options.shell == "words":
        words = [f"{word}\n" for word in following(options.words)]
    shared.write("".join(words).encode("ascii"))


def following(words: list[str]) -> list[str]:
    """Return what may come after some words; nothing where a file may."""
    from .command_line import COMMANDS, all_commands, command_of

    if words[-1:] in (["-a"], ["--address"], ["="]):
        return []
    name = command_of(words)
    known = all_commands([name] if name in COMMANDS else [])
    parser, parsers = shared.option_parsers(known)
    more = {"": COMMANDS, "help": COMMANDS, "completion": [*SHELLS]}
    options = parsers.get(name, parser).long_options()
    return more.get(name, []) + options
