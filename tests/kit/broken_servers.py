"""Servers that break one rule each, to test whether the kit finds them.

A broken server is sbus.py with one text replaced.  Each text occurs in it
exactly once: when sbus.py changes and one is gone, mend the entry.
"""

from __future__ import annotations

from typing import NamedTuple


class Broken(NamedTuple):
    """A mistake, the rule that it breaks, and how it is made."""

    name: str
    rule: str
    old: str
    new: str


BROKEN = [
    # 1. Overview
    Broken(
        "packet-above-the-limit-is-cut",
        "LIMIT-1",
        '        self.bus.limits.check("max_packet", size)\n',
        "        size = min(size, len(self._view))\n",
    ),
    Broken(
        "large-packets-are-cut",
        "LIMIT-2",
        "            receiver.outbox.append(packet)\n",
        "            receiver.outbox.append(packet[:50_000])\n",
    ),
    Broken(
        "packet-of-the-limit-is-refused",
        "LIMIT-3",
        'check("max_packet", size)',
        'check("max_packet", size + 1)',
    ),
    Broken(
        "long-keys",
        "LIMIT-4",
        "    if len(key) > max_key:\n",
        "    if len(key) > max_key + 1:\n",
    ),
    Broken(
        "one-segment-too-many",
        "LIMIT-17",
        'check("max_segments", segments)',
        'check("max_segments", segments - 1)',
    ),
    Broken(
        "one-pattern-too-many",
        "LIMIT-5",
        'check("max_patterns", len(client.patterns) + 1)',
        'check("max_patterns", len(client.patterns))',
    ),
    Broken(
        "bytes-of-patterns-are-not-counted",
        "LIMIT-6",
        "        client.pattern_bytes += size\n",
        "",
    ),
    Broken(
        "one-shape-too-many",
        "LIMIT-10",
        'check("max_shapes", self._users[uid] + 1)',
        'check("max_shapes", self._users[uid])',
    ),
    Broken(
        "one-client-too-many",
        "LIMIT-7",
        "        if count > most:\n",
        '        if count > most + (rule == "LIMIT-7"):\n',
    ),
    Broken(
        "one-client-of-a-user-too-many",
        "LIMIT-11",
        "            if own > own_most:\n                rule",
        "            if own > own_most + 1:\n                rule",
    ),
    Broken(
        "one-pattern-of-a-user-too-many",
        "LIMIT-12",
        'check("max_user_patterns", user.patterns + 1)',
        'check("max_user_patterns", user.patterns)',
    ),
    Broken(
        "bytes-of-patterns-of-a-user-are-not-counted",
        "LIMIT-13",
        "        client.user.pattern_bytes += size\n",
        "",
    ),
    Broken(
        "backlog-of-a-user-has-no-limit",
        "LIMIT-14",
        "            if user.backlog_bytes + size >"
        " limits.max_user_backlog:\n",
        "            if False:\n",
    ),
    Broken(
        "backlog-of-the-bus-has-no-limit",
        "LIMIT-15",
        "        if self.backlog_bytes + size > bus_bytes_max:\n",
        "        if False:\n",
    ),
    Broken(
        "no-place-is-kept-for-root",
        "LIMIT-16",
        "            most -= most // RESERVED_PART  # [LIMIT-16]\n",
        "",
    ),
    # 2. Routing keys
    Broken(
        "line-feed-ends-a-key",
        "KEY-1",
        '    head, nul, payload = packet.partition(b"\\0")\n'
        '    word, space, key = head.partition(b" ")\n'
        "    kind = KINDS",
        '    head, nul, payload = packet.partition(b"\\0")\n'
        '    word, space, key = head.partition(b" ")\n'
        '    key = key.rstrip(b"\\n")\n'
        "    kind = KINDS",
    ),
    Broken(
        "star-in-a-key-matches-all",
        "KEY-3",
        "        found: dict[Client, None] = {}\n"
        '        segments = key.split(b"/")\n',
        "        found: dict[Client, None] = {}\n"
        '        segments = key.replace(b"*", b"").split(b"/")\n',
    ),
    Broken(
        "lone-exclamation-marks",
        "KEY-4",
        '        if b"!" in rest.split(b"/"):\n',
        '        if b"!" == rest:\n',
    ),
    Broken(
        "all-exclamation-marks-are-reserved",
        "KEY-5",
        '        if b"!" in rest.split(b"/"):\n',
        '        if b"!" in rest:\n',
    ),
    Broken(
        "patterns-become-lower-case",
        "MATCH-1",
        '    segments = pattern.split(b"/")\n    is_open',
        "    pattern = pattern.lower()\n"
        '    segments = pattern.split(b"/")\n    is_open',
    ),
    Broken(
        "star-crosses-slashes",
        "MATCH-2",
        "    if len(segments) <= count if is_open"
        " else len(segments) != count:\n",
        "    if len(segments) <= count if is_open or stars else (\n"
        "        len(segments) != count\n"
        "    ):\n",
    ),
    Broken(
        "final-slash-needs-more",
        "MATCH-3",
        "    if len(segments) <= count if is_open"
        " else len(segments) != count:\n",
        '    if is_open and not b"".join(segments[count:]) or (\n'
        "        len(segments) != count and not is_open\n"
        "    ):\n",
    ),
    Broken(
        "empty-pattern-selects-the-empty-key-alone",
        "MATCH-4",
        "    is_open = not segments[-1]  # [MATCH-3]",
        "    is_open = not segments[-1] and len(segments) > 1  # [MATCH-3]",
    ),
    Broken(
        "patterns-are-beginnings",
        "MATCH-5",
        "    if is_open:\n        del segments[-1]\n",
        "    if is_open:\n        del segments[-1]\n    is_open = True\n",
    ),
    Broken(
        "star-needs-a-byte",
        "MATCH-6",
        "        literals[index] = literals[index][:size]\n",
        "        if len(literals[index]) == size:\n"
        "            return None\n"
        "        literals[index] = literals[index][:size]\n",
    ),
    Broken(
        "pattern-goes-on-after-a-star",
        "MATCH-6",
        '            if more.strip(b"*"):\n                return None\n',
        "",
    ),
    # 3. Protocol
    Broken(
        "payload-without-nul-is-required",
        "PKT-1",
        '    if kind == "publish" and not nul:\n',
        '    if kind == "publish" and (not nul or b"\\0" in payload):\n',
    ),
    Broken(
        "text-without-nul-is-published",
        "PKT-2",
        '    if kind == "publish" and not nul:\n',
        "    if False:\n",
    ),
    Broken(
        "unknown-kinds-are-published",
        "PKT-3",
        "    kind = KINDS.get(word) if space else None\n",
        '    kind = KINDS.get(word, "publish" if nul else None) if'
        " space else None\n",
    ),
    Broken(
        "empty-packet-is-ignored",
        "PKT-4",
        '            raise ProtocolError("PKT-4", "empty packet")\n',
        "            return False\n",
    ),
    Broken(
        "recent-keys-outlive-a-subscribe",
        "PKT-5",
        "            patterns = [pattern]\n"
        "            self._forget_recent(pattern)\n",
        "            patterns = [pattern]\n",
    ),
    Broken(
        "new-pattern-takes-the-place-of-others",
        "SUB-1",
        "            self._check_room(client, pattern)\n",
        "            self._check_room(client, pattern)\n"
        "            while client.patterns:\n"
        "                self._drop(client, [*client.patterns][0])\n",
    ),
    Broken(
        "identical-patterns-are-one",
        "SUB-2",
        "times=held.times + 1",
        "times=1",
    ),
    Broken(
        "text-after-nul-is-part-of-the-pattern",
        "SUB-3",
        '        payload = b""\n    return kind, key, payload',
        '        key, payload = key + payload, b""\n'
        "    return kind, key, payload",
    ),
    Broken(
        "unsubscribe-removes-all",
        "UNSUB-1",
        "        if held.times > 1:\n"
        "            client.patterns[pattern] ="
        " held._replace(times=held.times - 1)\n",
        "        if held.times > 1:\n"
        "            client.patterns[pattern] = held._replace(times=0)\n"
        "            self._drop(client, pattern)\n",
    ),
    Broken(
        "recent-keys-outlive-an-unsubscribe",
        "UNSUB-1",
        "        else:\n            self._forget_recent(pattern)\n"
        "            self._public.remove(",
        "        else:\n            self._public.remove(",
    ),
    Broken(
        "unknown-pattern-disconnects",
        "UNSUB-2",
        "            if self.strict:  # [UNSUB-2] MAY\n",
        "            if True:\n",
    ),
    Broken(
        "text-after-nul-is-part-of-what-is-unsubscribed",
        "UNSUB-3",
        '        payload = b""\n    return kind, key, payload',
        '        if kind == "unsubscribe":\n'
        "            key += payload\n"
        '        payload = b""\n'
        "    return kind, key, payload",
    ),
    Broken(
        "only-the-first-subscriber-hears",
        "PUB-1",
        "        for receiver in receivers:\n"
        "            if not receiver.outbox:\n",
        "        for receiver in receivers[:1]:\n"
        "            if not receiver.outbox:\n",
    ),
    Broken(
        "a-copy-for-each-pattern",
        "PUB-2",
        "        receivers = tuple(self._public.find(key))\n",
        "        receivers = tuple(\n"
        "            client\n"
        "            for client in self._public.find(key)\n"
        "            for pattern in client.patterns\n"
        "            if pattern_matches(pattern, key)\n"
        "        )\n",
    ),
    Broken(
        "everybody-hears",
        "PUB-3",
        "        receivers = tuple(self._public.find(key))\n",
        "        receivers = tuple(self.clients.values())\n",
    ),
    Broken(
        "nul-ends-the-payload",
        "PUB-4",
        "            receiver.outbox.append(packet)\n",
        '            parts = bytes(packet).split(b"\\0")\n'
        '            receiver.outbox.append(b"\\0".join(parts[:2]))\n',
    ),
    Broken(
        "the-publisher-always-hears",
        "PUB-5",
        "        if not client.echo:\n            receivers =",
        "        if client not in receivers:\n"
        "            receivers = (client, *receivers)\n"
        "        if not client.echo:\n"
        "            receivers =",
    ),
    Broken(
        "newest-message-first",
        "PUB-6",
        "        packets = iter(client.outbox)\n",
        "        packets = iter(client.outbox[::-1])\n",
    ),
    Broken(
        "control-packets-are-forwarded",
        "CTL-1",
        "                act(client, key)\n                return True\n",
        "                act(client, key)\n"
        "                receivers = tuple(self._public.find(key))\n",
    ),
    Broken(
        "unknown-control-packet-disconnects",
        "CTL-2",
        '            rule = "CTL-2"\n',
        '            raise ProtocolError("CTL-2", "unknown")\n',
    ),
    Broken(
        "answers-need-a-subscription",
        "CTL-3",
        '        client.outbox.append(b"CMSG " + key + b"\\0" + payload)\n',
        "        if any(pattern_matches(one, key) for one in"
        " client.patterns):\n"
        "            client.outbox.append("
        'b"CMSG " + key + b"\\0" + payload)\n',
    ),
    Broken(
        "payload-is-part-of-a-control-key",
        "CTL-4",
        "                act(client, key)\n",
        "                act(client, key + parse_packet(start)[2])\n",
    ),
    Broken(
        "stats-are-not-known",
        "CTL-5",
        'STATS = b"stats"\n',
        'STATS = b"statistics"\n',
    ),
    # 4. Secret messages
    Broken(
        "all-clients-are-the-server-itself",
        "CRED-1",
        "        client = self.bus.open(Credentials(gid, uid, pid), wire)\n",
        "        pid = os.getpid()\n"
        "        client = self.bus.open(Credentials(gid, uid, pid), wire)\n",
    ),
    Broken(
        "uid-comes-first",
        "CRED-2",
        '        return b"%d" % self.gid, b"%d" % self.uid, b"%d" %'
        " self.pid\n",
        '        return b"%d" % self.uid, b"%d" % self.gid, b"%d" %'
        " self.pid\n",
    ),
    Broken(
        "answers-overtake-messages",
        "CRED-3",
        '        client.outbox.append(b"CMSG " + key + b"\\0" + payload)\n',
        '        client.outbox.insert(0, b"CMSG " + key + b"\\0" + payload)\n',
    ),
    Broken(
        "secrets-of-others-may-be-subscribed-to",
        "CRED-4",
        "    if not fields_fit(pattern, own, prefix):\n",
        "    if False:\n",
    ),
    Broken(
        "secret-pattern-that-is-cut-short-is-not-expected",
        "CRED-5",
        "            check_secret(pattern, client.credentials,"
        " self.cred_prefix)\n"
        "        check_reserved(pattern)\n",
        "            if match_fields(pattern, self.cred_prefix):\n"
        "                check_secret(\n"
        "                    pattern, client.credentials,"
        " self.cred_prefix\n"
        "                )\n",
    ),
    Broken(
        "empty-field-is-text",
        "CRED-6",
        "        (field,) if field else (number, field)\n",
        "        (field,)\n",
    ),
    Broken(
        "empty-field-of-a-key-matches-nothing",
        "CRED-7",
        '        field in (b"", number)\n',
        "        field == number\n",
    ),
    Broken(
        "leading-zeros-are-nothing",
        "CRED-7",
        '        field in (b"", number)\n',
        '        field.lstrip(b"0") in (b"", number)\n',
    ),
    Broken(
        "nobody-has-secrets",
        "CRED-8",
        "    if own.pid == 0 or OVERFLOW_ID in (own.uid, own.gid):\n",
        "    if False:\n",
    ),
    Broken(
        "prefix-is-not-expected",
        "CRED-9",
        '    start = prefix + b"/" if prefix else b""\n',
        '    start = b""\n',
    ),
    Broken(
        "wide-patterns-hear-secrets",
        "CRED-10",
        "            return tuple(\n"
        "                client\n"
        "                for client in found\n",
        "            found.update(self._public.find(key))\n"
        "            return tuple(\n"
        "                client\n"
        "                for client in found\n",
    ),
    Broken(
        "secrets-are-for-all-who-have-secrets",
        "CRED-11",
        "                for client in found\n"
        "                if fields_fit(key, client.credentials,"
        " self.cred_prefix)\n",
        "                for client in self.clients.values()\n"
        "                if any(one.startswith(SECRET)"
        " for one in client.patterns)\n",
    ),
    # 5. Flood control
    Broken(
        "soft-mode-is-discard-at-first",
        "BLOCK-1",
        '        self.soft_mode = "queue"\n',
        '        self.soft_mode = "discard"\n',
    ),
    Broken(
        "first-mode-counts",
        "BLOCK-2",
        "                setattr(client, what, choice)\n",
        '                if client.soft_mode == "queue":\n'
        "                    setattr(client, what, choice)\n",
    ),
    Broken(
        "stack-without-a-backlog",
        "BLOCK-3",
        "        packets = iter(client.outbox)\n",
        '        step = -1 if client.backlog.order == "stack" else 1\n'
        "        packets = iter(client.outbox[::step])\n",
    ),
    Broken(
        "queue-discards",
        "BLOCK-4",
        "        self._queue(receiver, packet)  # [BLOCK-4] [BLOCK-14]\n",
        "",
    ),
    Broken(
        "discard-queues",
        "BLOCK-5",
        '        if receiver.soft_mode == "discard":  # [BLOCK-5]\n'
        "            return self.discard("
        'receiver, [packet], "soft/discard")\n',
        "",
    ),
    Broken(
        "discard-gives-up",
        "BLOCK-6",
        "            if backlog.bytes or client.deaf or"
        " client.user in self._slow:\n"
        "                packet = next(packets, None)\n",
        "            if backlog.bytes or client.deaf or"
        " client.discarded:\n"
        "                packet = next(packets, None)\n",
    ),
    Broken(
        "soft-block-does-not-pause",
        "BLOCK-7",
        '        is_soft = receiver.soft_mode == "block"\n',
        "        is_soft = False\n",
    ),
    Broken(
        "soft-error-discards",
        "BLOCK-8",
        '            raise ProtocolError("BLOCK-8", "stalled in soft'
        ' mode error")\n',
        '            return self.discard(receiver, packet, "soft/discard")\n',
    ),
    Broken(
        "hard-discard-queues",
        "BLOCK-9",
        "                return self.discard("
        'receiver, [packet], "hard/discard")\n',
        "                return self._queue(receiver, packet)\n",
    ),
    Broken(
        "paused-until-all-is-read",
        "BLOCK-10",
        'self._pause(publisher, receiver, most // 2, "BLOCK-10")',
        'self._pause(publisher, receiver, 0, "BLOCK-10")',
    ),
    Broken(
        "hard-error-discards",
        "BLOCK-11",
        '                raise ProtocolError("BLOCK-11", excess)\n',
        "                return self.discard(receiver, packet,"
        ' "hard/discard")\n',
    ),
    Broken(
        "pause-is-for-all",
        "BLOCK-12",
        "        if events & READ and not client.closed:\n"
        "            self.turn(client)\n",
        "        clients = self.bus.clients.values()\n"
        "        if any(one.holding for one in clients):\n"
        "            return\n"
        "        if events & READ and not client.closed:\n"
        "            self.turn(client)\n",
    ),
    Broken(
        "every-publisher-adds-to-a-backlog",
        "BLOCK-21",
        "            if self._is_far_above(receiver):\n",
        "            if False:\n",
    ),
    Broken(
        "anybody-may-pause",
        "BLOCK-13",
        "        return uid == publisher.user.uid and uid != OVERFLOW_ID\n",
        "        return True\n",
    ),
    Broken(
        "soft-block-discards-where-it-may-not-pause",
        "BLOCK-14",
        "        if is_soft and self.may_pause(publisher, receiver):\n",
        "        if is_soft and not self.may_pause(publisher,"
        " receiver):\n"
        "            return self.discard(receiver, packet,"
        ' "soft/discard")\n'
        "        if is_soft:\n",
    ),
    Broken(
        "hard-block-queues-where-it-may-not-pause",
        "BLOCK-15",
        '                raise ProtocolError("BLOCK-15", excess)\n',
        "                return self._queue(receiver, packet)\n",
    ),
    Broken(
        "holders-hold-for-ever",
        "BLOCK-16",
        "                self.expel("
        'client, ProtocolError("BLOCK-16", what))\n',
        "                pass\n",
    ),
    Broken(
        "answers-are-discarded",
        "BLOCK-17",
        '        if packet[:5] == b"CMSG ":\n',
        "        if False:\n",
    ),
    Broken(
        "answers-have-no-limit",
        "BLOCK-18",
        '                raise ProtocolError("BLOCK-18", excess)\n',
        "                return self._queue(receiver, packet)\n",
    ),
    Broken(
        "packets-without-overhead",
        "BLOCK-19",
        "PACKET_OVERHEAD_BYTES = 128  # [BLOCK-19]",
        "PACKET_OVERHEAD_BYTES = 0",
    ),
    Broken(
        "discarded-packets-are-not-counted",
        "BLOCK-20",
        "        receiver.discarded += len(packets)\n",
        "",
    ),
    Broken(
        "queue-is-stack",
        "ORDER-1",
        '    b"order/queue": ("order", "queue", "BLOCK-2"),\n',
        '    b"order/queue": ("order", "stack", "BLOCK-2"),\n',
    ),
    Broken(
        "stack-is-queue",
        "ORDER-2",
        '    b"order/stack": ("order", "stack", "BLOCK-2"),\n',
        '    b"order/stack": ("order", "queue", "BLOCK-2"),\n',
    ),
    Broken(
        "smallest-first",
        "ORDER-3",
        "            size, place = heap[0]\n",
        "            size, place = max(heap)\n",
    ),
    Broken(
        "ties-are-always-oldest-first",
        "ORDER-4",
        "        heap = self._heaps.get(sign)\n",
        "        sign = 1\n        heap = self._heaps.get(sign)\n",
    ),
    Broken(
        "new-order-for-new-packets-only",
        "ORDER-5",
        "                client.backlog.reorder(choice)\n",
        "                if not client.backlog.bytes:\n"
        "                    client.backlog.reorder(choice)\n",
    ),
    # 6. Echoes
    Broken(
        "no-echo-at-first",
        "ECHO-1",
        "        self.echo = True\n",
        "        self.echo = False\n",
    ),
    Broken(
        "echo-off-is-ignored",
        "ECHO-2",
        "        if not client.echo:\n            receivers =",
        "        if False:\n            receivers =",
    ),
    Broken(
        "echo-stays-off",
        "ECHO-3",
        '("echo", True, "ECHO-3")',
        '("echo", False, "ECHO-3")',
    ),
    # 7. Connections
    Broken(
        "everybody-may-connect",
        "CONN-2",
        "        if self.allowed_uids is not None and uid not in"
        " self.allowed_uids:\n",
        "        if False:\n",
    ),
    Broken(
        "last-words-are-lost",
        "CONN-6",
        "            pass  # [CONN-6] its packets are still to come\n",
        "            ended = True\n",
    ),
    Broken(
        "deaf-client-is-disconnected",
        "CONN-8",
        "            self._deafen(client)\n"
        "        elif not isinstance(error, BlockingIOError):\n",
        "            self.disconnect(client, error)\n"
        "        elif not isinstance(error, BlockingIOError):\n",
    ),
    Broken(
        "end-of-input-loses-the-outbox",
        "CONN-10",
        "        self._flush(client)\n        if fault:\n",
        "        if ended:\n"
        "            self.bus.touched.clear()\n"
        '            return self.disconnect(client, "end of input")\n'
        "        self._flush(client)\n"
        "        if fault:\n",
    ),
    Broken(
        "reader-that-failed-is-cut-off",
        "CONN-18",
        "        client.fault = str(fault)\n",
        "        return self.disconnect(client, error)\n",
    ),
    Broken(
        "mistake-loses-what-was-before",
        "CONN-11",
        "        except (ProtocolError, OSError) as error:\n"
        "            fault = error.with_traceback(None)"
        "  # which would hold this frame\n"
        "        self._flush(client)\n",
        "        except (ProtocolError, OSError) as error:\n"
        "            self.bus.touched.clear()\n"
        "            return self.disconnect(client, error)\n"
        "        self._flush(client)\n",
    ),
    Broken(
        "mistake-stops-the-server",
        "CONN-12",
        "        if fault:\n            self.disconnect(client, fault)\n",
        "        if fault:\n            raise fault\n",
    ),
]
