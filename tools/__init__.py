"""Programs on top of the client: record, top, bridge, request and others.

They are commands of `sbus` beside those of sbus_client.py, and what sub, pub
and stats can do that not everybody needs in a drop-in.  From the
repository it is `python3 tools record DIR`; installed, this package is
`sbus_tools`, and the command `sbus` is its `command_line`.
"""
