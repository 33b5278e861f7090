"""Standard streams to and from a Unix socket, as `nc -U`; or slower.

relay.py PATH [BYTES_A_SECOND]
"""

import contextlib
import os
import select
import socket
import sys
import time

wire = socket.socket(socket.AF_UNIX)
if wire.connect_ex(sys.argv[1]):
    sys.exit("relay: nobody listens")
speed = int(sys.argv[2]) if sys.argv[2:] else 0
if speed:
    for option in socket.SO_SNDBUF, socket.SO_RCVBUF:
        wire.setsockopt(socket.SOL_SOCKET, option, 4_096)

ways = {0: wire.fileno(), wire.fileno(): 1}
poll = select.poll()
for source in ways:
    poll.register(source, select.POLLIN)
with contextlib.suppress(OSError):  # the other side may have gone
    while True:
        for source, _ in poll.poll():
            text = os.read(source, speed // 20 or 65_536)
            if not text:
                sys.exit()
            if speed:
                time.sleep(len(text) / speed)
            while text:
                text = text[os.write(ways[source], text) :]
