"""Writes the pages sbusd(1) and sbus(1), from the options of the programs.

    manual.py [FILE ...]   write sbusd.1, sbus.1, or all pages to a .md file

They are not kept: `make install`, a wheel, the sdist and the book have them
written.  sbus.7 is written by hand.  This program needs nothing but Python.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Callable, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import sbus  # noqa: E402
from tools import command_line, shared  # noqa: E402

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


def markdown(text: str) -> str:
    """Return text as it is written in a page of the book."""
    return re.sub(r"([^\w\s/.,;:()-])", r"\\\1", text.strip())


class Form(NamedTuple):
    """How the parts of a page are written."""

    text: Callable[[str], str]
    section: str
    command: str
    bold: str
    italic: str
    item: str
    example: str


ROFF = Form(
    text=roff,
    section=".SH {}",
    command=".SS {}",
    bold="\\fB{}\\fR",
    italic="\\fI{}\\fR",
    item=".TP\n{}\n{}",
    example=".PP\nExample:\n.IP\n.B sbus {}",
)
MARKDOWN = Form(
    text=markdown,
    section="\n### {}\n",
    command="\n#### {}\n",
    bold="**{}**",
    italic="*{}*",
    item="- {}: {}",
    example="\nExample: **sbus {}**\n",
)


def items(parser: argparse.ArgumentParser, form: Form) -> Iterator[str]:
    """Yield a paragraph for each argument and option of a parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            continue
        names = ", ".join(
            form.bold.format(form.text(name)) for name in action.option_strings
        )
        value = action.metavar or (
            action.dest.upper() if action.nargs != 0 else ""
        )
        if value:
            value = form.italic.format(form.text(str(value)))
        about = (action.help or "") % {**vars(action), "prog": parser.prog}
        term = " ".join(filter(None, (names, str(value))))
        yield form.item.format(term, form.text(about))


def sections(texts: dict[str, str], form: Form) -> Iterator[str]:
    """Yield sections with their titles."""
    for title, text in texts.items():
        yield form.section.format(title)
        yield form.text(text)


def server_parser() -> argparse.ArgumentParser:
    """Return the parser of sbusd, which is seen as it prints its help."""
    parsers: list[argparse.ArgumentParser] = []

    def note(parser: argparse.ArgumentParser) -> str:
        parsers.append(parser)
        return ""

    format_help = argparse.ArgumentParser.format_help
    setattr(argparse.ArgumentParser, "format_help", note)  # noqa: B010
    try:
        sbus.parse_options(["--help"])
    except SystemExit:
        return parsers[0]
    finally:
        setattr(argparse.ArgumentParser, "format_help", format_help)  # noqa: B010
    raise AssertionError("it prints no help")


def server_page(form: Form) -> Iterator[str]:
    """Yield the parts of the page of sbusd."""
    yield from sections({"DESCRIPTION": SERVER}, form)
    yield form.section.format("OPTIONS")
    yield from items(server_parser(), form)
    yield from sections(SERVER_MORE, form)


def client_page(form: Form) -> Iterator[str]:
    """Yield the parts of the page of sbus, with all its commands."""
    commands = command_line.all_commands()
    parser, parsers = shared.option_parsers(commands)
    yield from sections({"DESCRIPTION": CLIENT}, form)
    yield form.section.format("OPTIONS")
    yield from items(parser, form)
    yield form.section.format("COMMANDS")
    for name, command in commands.items():
        yield form.command.format(name)
        yield form.text(parsers[name].description or "")
        yield from items(parsers[name], form)
        yield form.example.format(form.text(command.example))
    yield from sections(CLIENT_MORE, form)


PAGES = {
    "sbusd": ("a simple message bus over Unix-domain sockets", server_page),
    "sbus": ("use a message bus", client_page),
}


def roff_page(name: str) -> str:
    """Return a manual page, as man reads it."""
    short, parts = PAGES[name]
    lines = [
        f'.TH {name.upper()} 1 "" "sbus {sbus.__version__}" "Message bus"',
        ".ad l",  # long words leave gaps in narrow lines otherwise
        f".SH NAME\n{name} \\- {roff(short)}",
        *parts(ROFF),
        ".SH SEE ALSO\n.BR sbusd (1),\n.BR sbus (1),\n.BR sbus (7)",
    ]
    return "\n".join(lines) + "\n"


def book_pages() -> str:
    """Return all pages, as the book has them."""
    lines = []
    for name, (short, parts) in PAGES.items():
        lines += [f"\n## {name}: {short}\n", *parts(MARKDOWN)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write what is asked for, or both manual pages beside this file."""
    both = [Path(__file__).with_name(f"{name}.1") for name in PAGES]
    for file in [*map(Path, sys.argv[1:])] or both:
        is_of_book = file.suffix == ".md"
        text = book_pages() if is_of_book else roff_page(file.stem)
        file.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
