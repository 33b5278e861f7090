"""Services: programs over the bus, for what the protocol leaves to others.

A file is a command of `sbus`, as those of tools/ are, or a part of some.  It
imports nothing but the standard library, sbus_client.py, and what the commands
share.  Installed, this package is `sbus_services`, beside `sbus_tools`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING or __name__ == "services":
    from tools import json_lines, shared
else:
    from sbus_tools import json_lines, shared

__all__ = ["json_lines", "shared"]
