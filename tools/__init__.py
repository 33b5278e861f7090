"""The command `sbus`: its programs, on top of sbus_client.

command_line finds the command and runs it, and shared has what the commands
share.  Most other files hold the command that they are named for.
From the repository it is `python3 tools sub`; installed, this package is
`sbus_tools`.
"""
