"""Joins a bus and a broker of MQTT 5, by paho-mqtt.

    mqtt_gateway.py broker.example 1883 --out 'sensors/' --in 'commands/*'

Messages have QoS 1, so the broker may have some twice.  What is lost:

    to the broker    what is published while no gateway runs; what exceeds
                     10,000 messages while the broker is away (counted); what
                     still waits here when the gateway is killed
    from the broker  nothing, once it has run: the broker keeps what comes for
                     a day, if its own queue holds that (max_queued_messages).
                     A broker that is killed loses what it had not written to
                     its disk (persistence, autosave_interval)
    neither way      requests, secrets, and what does not fit (counted)

Messages keep their order as long as a connection lasts.  A slow broker slows
publishers down.  SIGTERM delivers what was published before.  If the bus ends,
so does the gateway, with status 1: let systemd start it again.  One gateway
joins a bus and a broker: a second one, or a bridge beside it, makes a ring.
For TLS and passwords, set them on `broker` below, as the manual of paho-mqtt
says.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
from typing import Any

from paho.mqtt.client import Client, MQTTv5
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

import sbus_client
from broker_names import MQTT, Losses, first_match, is_request, parse_options

WAITING_MAX = 10_000
DAY_SECONDS = 86_400
# A server disconnects a holder that takes nothing for five seconds
STALL_SECONDS = 3
END_SECONDS = 10

options = parse_options(__doc__)
losses = Losses()
# What the broker has not acknowledged yet is bounded
room = threading.Semaphore(WAITING_MAX)


def carry_out(bus: sbus_client.Client, broker: Any) -> None:
    """Publish at the broker what comes from the bus, to the last answer."""
    for message in bus:
        if isinstance(message, sbus_client.ControlMessage):
            break
        seconds = STALL_SECONDS if broker.is_connected() else 0
        if is_request(message.payload):
            losses.add("not let out")
        elif room.acquire(timeout=seconds):
            broker.publish(MQTT.name(message.key), message.payload, qos=1)
        else:
            losses.add("lost, as the broker is slow or away")
    for _ in range(WAITING_MAX):
        room.acquire(timeout=END_SECONDS)


def carry_in(bus: sbus_client.Client, broker: Any, message: Any) -> None:
    """Publish a message on the bus; acknowledge it once the bus has it."""
    key = MQTT.key(message.topic)
    match = None if key is None else first_match(options.into, key)
    numbers = getattr(message.properties, "SubscriptionIdentifier", [])
    try:
        if key is None or match is None or is_request(message.payload):
            losses.add("not let in")
        # A broker may send a copy for each pattern: that of the first counts
        elif not numbers or match + 1 in numbers:
            bus.publish(key, message.payload)
    except sbus_client.Disconnected:
        # This ends carry_out as well, and the broker keeps the message
        return
    except sbus_client.SbusError:
        losses.add("not let in")
    broker.ack(message.mid, message.qos)


def subscribe(broker: Any, reason: Any) -> None:
    """Ask the broker, at each connection, for what goes in."""
    print(f"{options.host}: {reason}", flush=True)
    for index, pattern in enumerate(options.into):
        number: Any = Properties(PacketTypes.SUBSCRIBE)
        number.SubscriptionIdentifier = index + 1
        topic = MQTT.filter(pattern.encode())
        how = SubscribeOptions(qos=1, noLocal=True)
        broker.subscribe(topic, options=how, properties=number)


def leave_at_signal(bus: sbus_client.Client) -> None:
    """Ask for no more messages, and for an answer behind the last one."""
    signal.sigwait([signal.SIGTERM])
    for pattern in options.out:
        bus.unsubscribe(pattern)
    bus.control(sbus_client.WHOAMI)


def main() -> None:
    """Carry both ways, until the bus or SIGTERM ends that."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    with sbus_client.Client(options.address) as bus:
        name = f"sbus-{socket.gethostname()}-{bus.address}"
        version = CallbackAPIVersion.VERSION2
        broker: Any = Client(version, name, protocol=MQTTv5, manual_ack=True)
        broker.on_connect = lambda *a: subscribe(broker, a[3])
        broker.on_subscribe = lambda *a: print(*a[3], flush=True)
        broker.on_message = lambda *a: carry_in(bus, broker, a[2])
        broker.on_publish = lambda *_: room.release()
        session: Any = Properties(PacketTypes.CONNECT)
        session.SessionExpiryInterval = DAY_SECONDS
        at = (options.host, options.port)
        broker.connect_async(*at, clean_start=False, properties=session)

        bus.control("echo/off")
        for pattern in options.out:
            bus.subscribe(pattern)
        broker.loop_start()
        leaver = threading.Thread(target=leave_at_signal, args=[bus])
        leaver.daemon = True
        leaver.start()
        try:
            carry_out(bus, broker)
        finally:
            broker.disconnect()
            broker.loop_stop()


try:
    main()
except (sbus_client.SbusError, OSError) as error:
    sys.exit(str(error))
