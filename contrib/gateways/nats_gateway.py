"""Joins a bus and a server or cluster of NATS, by nats-py.

    nats_gateway.py nats.example 4222 --out 'sensors/' --in 'commands/*'

NATS without JetStream keeps nothing.  What is lost:

    to the server    what is published while no gateway runs; what exceeds two
                     megabytes while the server is away (counted); what it had
                     not sent on when it was killed
    from the server  what comes while the gateway is away, or while the bus is
                     slower than the server for 65,536 messages (counted, and
                     the sender does not hear of it)
    neither way      requests, secrets, and what does not fit (counted)

SIGTERM delivers what was published before.  If the bus ends, so does the
gateway, with status 1: let systemd start it again.  One gateway joins a bus
and a server: a second one, or a bridge beside it, makes a ring.  For TLS and
passwords, give them to `connect` below, as the manual of nats-py says.
"""

from __future__ import annotations

import asyncio
import functools
import signal
import sys
from typing import Any

import nats

import sbus_client
from broker_names import NATS, Losses, first_match, is_request, parse_options

options = parse_options(__doc__)
losses = Losses()


async def carry_in(
    bus: sbus_client.AsyncClient, number: int, message: Any
) -> None:
    """Publish a message of the server on the bus."""
    key = NATS.key(message.subject)
    match = None if key is None else first_match(options.into, key)
    if key is None or match is None or is_request(message.data):
        losses.add("not let in")
    # The server sends a copy for each pattern: that of the first counts
    elif match == number:
        try:
            await bus.publish(key, message.data)
        except (sbus_client.PacketError, sbus_client.PacketTooLarge):
            losses.add("not let in")


async def carry_out(bus: sbus_client.AsyncClient, server: Any) -> None:
    """Publish at the server what comes from the bus, to the last answer."""
    async for message in bus:
        if isinstance(message, sbus_client.ControlMessage):
            return
        subject = NATS.name(message.key)
        if is_request(message.payload):
            losses.add("not let out")
            continue
        try:
            await server.publish(subject, message.payload)
        except nats.errors.Error as error:
            losses.add(f"lost: {error}")


async def ask_for_the_end(bus: sbus_client.AsyncClient) -> None:
    """Ask for no more messages, and for an answer behind the last one."""
    for pattern in options.out:
        await bus.unsubscribe(pattern)
    await bus.control(sbus_client.WHOAMI)


async def tell(error: Exception) -> None:
    """Count what the server or the library reports."""
    losses.add(f"reported: {error or type(error).__name__}")


async def main() -> None:
    """Carry both ways, until the bus or SIGTERM ends that."""
    async with sbus_client.AsyncClient(options.address) as bus:
        url = f"nats://{options.host}:{options.port}"
        server = await nats.connect(
            url, no_echo=True, max_reconnect_attempts=-1, error_cb=tell
        )
        for number, pattern in enumerate(options.into):
            work = functools.partial(carry_in, bus, number)
            subject = NATS.filter(pattern.encode())
            await server.subscribe(subject, cb=work, pending_msgs_limit=65_536)
        await bus.control("echo/off")
        for pattern in options.out:
            await bus.subscribe(pattern)
        await bus.sync()
        print(f"{options.host}: connected", flush=True)

        def leave() -> None:
            asyncio.ensure_future(ask_for_the_end(bus))

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leave)
        try:
            await carry_out(bus, server)
        finally:
            await server.drain()


try:
    asyncio.run(main())
except (sbus_client.SbusError, OSError) as error:
    sys.exit(str(error))
