"""Programs on top of the client: record, top, bridge and others.

They are the command `sbus`, with those of sbus_client.py, some of which can
do more here than everybody needs in a drop-in.  A command's file is loaded
when the command is used.  From the repository it is `python3 tools record
DIR`; installed, this package is `sbus_tools`, and the command `sbus` is its
`command_line`.
"""
