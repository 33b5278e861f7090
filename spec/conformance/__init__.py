"""conformance: does a server, or a client, keep the rules of sbus?

The chapters of spec/ and the files of spec/examples/ hold examples: blocks of
patterns and keys, of packets, and of conversations between clients and a
server.  This program reads them and runs them against any server:

    python3 spec/conformance --server './sbusd -f -a {address}'

It needs the folder that it stands in, CPython 3.9 or later on Linux, and
nothing else.  The server stays in the foreground, listens at the address,
serves until SIGTERM, answers !/cred/whoami, stays up whatever its clients do,
and goes on when it was stopped (SIGSTOP, SIGCONT).  If it dies or hangs, that
is a finding of the example that caused it, and the kit starts it anew.  The
exit status is 0 if no example failed, 1 if one did or there was no time for
all, and 2 if none could be run.  Clients are tried by adapters, which do
what they are told, as spec/README.md has it:

    python3 spec/conformance --client './adapter {address}'

    rules           the rules of the chapters
    examples        their examples
    conversation    what clients and a server say to each other
    wire            a client of a real server
    server          a server that runs as a process
    trial           the frame of a check of that process
    running         checks of its start and end
    daemons         checks of a daemon
    traffic         checks of what clients make it do
    logs            checks of its log and its trace
    kit             which examples and checks are run, and how each ended
    clients         what a client is told, and what the kit, its server, says
    report          the results, for people, programs and browsers
    __main__        the command line

A module imports only those above it.

Names: rule, a sentence of spec/ with an id; block, a fenced example; case,
what one block or one of its rows says; step, a line of a conversation;
settle, wait until the server has handled all that a client sent.

Licence: ISC, see LICENSE.
"""
