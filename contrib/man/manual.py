"""Writes sbusd.1 and sbus.1 beside this file, from the programs' options.

`make manual` runs it.  sbus.7 is written by hand.  A test sees to it that the
pages are up to date.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import sbus
from tools import command_line, shared

SERVER = """
A server of a simple message bus: processes of several users connect to its
socket, subscribe to patterns of routing keys, and publish messages.  It runs
until a signal ends it.  sbus(7) describes what clients send and receive; the
chapters in spec/ of its source describe everything.
"""
SERVER_MORE = {
    "SIGNALS": """
SIGTERM, SIGINT and, in the foreground, SIGHUP end the server once it has
delivered what it has read, within a second at most.  On SIGUSR1 it logs what
each user's clients use and have done.
""",
    "EXIT STATUS": """
0 after a signal, or with --close when the last client has gone; 1 if it
cannot start or runs out of memory; 2 for a wrong command line.
""",
    "ENVIRONMENT": """
SBUS_ADDRESS is the address if neither --address nor a service manager gives
one.  XDG_RUNTIME_DIR is the first of the directories for the default socket
of a user other than root.  A service manager sets LISTEN_PID, LISTEN_FDS and
NOTIFY_SOCKET.
""",
    "FILES": """
The default socket is /run/sbus.socket for root.  For another user it is
sbus.socket in the first of $XDG_RUNTIME_DIR and /run/user/UID that is a
directory of that user alone, or else in /tmp/sbus-UID, which the server makes.
""",
}
CLIENT = """
Publish messages on a bus, print, record and answer them, join two buses, and
see what a server and its clients do.
"""
CLIENT_MORE = {
    "EXIT STATUS": """
0, or 1 for an error of the bus, 2 for a wrong command line, 130 if
interrupted.
""",
    "ENVIRONMENT": """
SBUS_ADDRESS is the default of --address; SBUS_MAX_PACKET is the largest packet
in bytes.
""",
}


def roff(text: str) -> str:
    """Return text as it is written in a manual page."""
    lines = text.strip().replace("\\", "\\e").replace("-", "\\-").splitlines()
    return "\n".join(
        f"\\&{line}" if line[:1] in ".'" else line for line in lines
    )


def items(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield a paragraph for each argument and option of a parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            continue
        value = action.metavar or (
            action.dest.upper() if action.nargs != 0 else ""
        )
        value = f"\\fI{roff(str(value))}\\fR" if value else ""
        names = ", ".join(
            f"\\fB{roff(name)}\\fR" for name in action.option_strings
        )
        about = (action.help or "") % {**vars(action), "prog": parser.prog}
        yield f".TP\n{' '.join(filter(None, (names, value)))}\n{roff(about)}"


def page(
    name: str, short: str, about: str, body: list[str], more: dict[str, str]
) -> str:
    """Return a manual page."""
    version = sbus.__version__
    lines = [
        f'.TH {name.upper()} 1 "" "sbus {version}" "Message bus"',
        ".ad l",  # long words leave gaps in narrow lines otherwise
        f".SH NAME\n{name} \\- {roff(short)}",
        f".SH DESCRIPTION\n{roff(about)}",
        *body,
        *(f".SH {title}\n{roff(text)}" for title, text in more.items()),
        ".SH SEE ALSO\n.BR sbusd (1),\n.BR sbus (1),\n.BR sbus (7)",
    ]
    return "\n".join(lines) + "\n"


def server_page() -> str:
    """Return the page of sbusd, whose parser is seen as it prints its help."""
    parsers: list[argparse.ArgumentParser] = []

    def note(parser: argparse.ArgumentParser) -> str:
        parsers.append(parser)
        return ""

    help_ = mock.patch("argparse.ArgumentParser.format_help", note)
    with help_, contextlib.suppress(SystemExit):
        sbus.parse_options(["--help"])
    body = [".SH OPTIONS", *items(parsers[0])]
    short = "a simple message bus over Unix-domain sockets"
    return page("sbusd", short, SERVER, body, SERVER_MORE)


def client_page() -> str:
    """Return the page of sbus, with all its commands."""
    commands = command_line.all_commands()
    parser, parsers = shared.option_parsers(commands)
    body = [".SH OPTIONS", *items(parser), ".SH COMMANDS"]
    for name, command in commands.items():
        about = parsers[name].description or ""
        body.append(f".SS {name}\n{roff(about)}")
        body += items(parsers[name])
        body.append(f".PP\nExample:\n.IP\n.B sbus {roff(command.example)}")
    return page("sbus", "use a message bus", CLIENT, body, CLIENT_MORE)


def rules() -> str:
    """Return the sentence of each rule, which `sbus help RULE` prints."""
    chapters = sorted(ROOT.glob("spec/[1-9]-*.md"))
    text = "\n".join(chapter.read_text("utf-8") for chapter in chapters)
    sentences = re.findall(r"^\*\*\[(\S+)\]\*\* (.*?)\n\n", text, re.M | re.S)
    return "".join(
        f"{name} {' '.join(sentence.split())}\n"
        for name, sentence in sentences
    )


ROOT = Path(__file__).parents[2]
PAGES = {"sbusd.1": server_page, "sbus.1": client_page}

if __name__ == "__main__":
    for file, write in PAGES.items():
        Path(__file__).with_name(file).write_text(write(), encoding="utf-8")
    (ROOT / "tools/rules.txt").write_text(rules(), encoding="utf-8")
