"""Programs on top of the client: record, top, bridge, and completion.

They are commands of `sbus` beside those of sbus_client.py.  From the
repository it is `python3 tools record DIR`; installed, this package is
`sbus_tools`, and the command `sbus` is its `command_line`.
"""
