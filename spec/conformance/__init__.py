"""conformance: does a server, or a client, keep the rules of sbus?

The chapters of spec/ and the files of spec/examples/ hold examples.  This
program runs them against any server, and looks at its process:

    python3 spec/conformance --server './sbusd -f -a {address}'
    python3 spec/conformance --client './adapter {address}'

It needs CPython 3.9 or later on Linux; spec/README.md says what a server and
an adapter do.  The exit status is 0 if no example failed, 1 if one did or
failures took too long, and 2 if none was run.

    rules           the rules of the chapters
    examples        their examples
    conversation    what clients and a server say to each other
    wire            a client of a real server
    counts          what the counts of a server add up to
    server          a server that runs as a process
    trial           the frame of a check of that process
    check_process   checks of its start and end
    check_log       checks of its log and its trace
    check_daemon    checks of a server that goes on as a daemon
    check_traffic   checks of what clients make it do, with descriptors too
    check_flood     checks of what it does when clients lag
    check_secrets   a check of who hears secrets
    check_random    conversations at random, of which random_walk tells more
    check_again     checks that hold the examples again
    kit             which examples and checks are run, and how each ended
    jobs            several kits at once, each in a process of its own
    random_writer   conversations at random, as the model predicts them
    random_walk     how they are made, held with a server, and shrunk
    clients         what a client is told, and what the kit, its server, says
    report          the results, for people, programs and browsers
    __main__        the command line

A module imports only those above it; a check of random conversations imports
the walk when it is run.  A block is a fenced example, a case is
a block or one of its rows, and a step is a line of a conversation.  To settle
is to wait until the server has handled all.  Licence: ISC, see LICENSE.
"""
