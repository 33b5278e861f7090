"""The command `sbus`: its programs, on top of sbus_client.

command_line finds the command and runs it, options has what the commands
share, and most of the other files are named for the command that they are.
From the repository it is `python3 tools sub`; installed, this package is
`sbus_tools`.
"""
