"""The modules that small and old Pythons lack."""

from __future__ import annotations

# By the packages of a system, of what our programs might import or use
SMALL_PYTHONS = {
    "Debian python3-minimal": """
        asyncio concurrent contextvars ctypes dataclasses decimal difflib html
        json lzma mmap multiprocessing pprint queue resource secrets shlex
        shutil socketserver statistics termios uuid xml""",
    "OpenWrt python3-light": """
        asyncio ctypes decimal email logging lzma multiprocessing pydoc
        readline sqlite3 ssl unittest urllib uuid xml""",
    "Yocto python3-core python3-io": """
        asyncio concurrent contextvars ctypes decimal difflib html json logging
        mmap multiprocessing numbers pickle pprint queue resource shlex
        socketserver sqlite3 statistics unittest xml""",
    "PyPy 7.3": """
        socket.MSG_NOSIGNAL socket.SO_PASSCRED socket.SO_PEERCRED""",
}
