"""What chapter 5 promises, looked at in each state of a world and each step.

Where nothing is said of a state, the rules of one packet decide, and the model
is compared with the server.
"""

from __future__ import annotations

import model
from world import World

READS_MAX = 1_000  # of all clients, after which they have read all
RULES = {"soft": "BLOCK-7", "hard": "BLOCK-10"}


class Violation(Exception):
    """A rule of chapter 5 is broken."""

    lines: list[str] = []  # a conversation that leads there


def require(condition: object, text: str) -> None:
    """Raise Violation if something is not so."""
    if not condition:
        raise Violation(text)


class CheckedWorld(World):
    """A world that raises Violation at a step that breaks a rule."""

    def take(self, action: str, name: str) -> str:
        """Take a step; return it as a line of a conversation."""
        sizes = self.sizes()
        holds = self.holds()
        if action == "handle":
            holders = self.bus.paused_by(self.clients[name])
            require(not holders, "BLOCK-12: a paused publisher is read")
        line = super().take(action, name)
        if not self.unclear:
            self.check_losses(sizes, name)
            self.check_freed(holds)
        return line

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return how much each client has lost, and what waits for it."""
        return {
            name: (client.counts["discarded"], client.backlog_bytes)
            for name, client in self.clients.items()
        }

    def holds(self) -> set[tuple[str, str, model.Hold]]:
        """Return which client holds which."""
        names = {client.number: name for name, client in self.clients.items()}
        return {
            (name, names[number], hold)
            for name, client in self.clients.items()
            for number, hold in client.holds.items()
        }

    def check_losses(
        self, sizes: dict[str, tuple[int, int]], publisher: str
    ) -> None:
        """Raise Violation if a packet is lost, or waits, without a reason."""
        for name, (discarded, size) in sizes.items():
            receiver = self.clients[name]
            is_lost = receiver.counts["discarded"] > discarded
            is_leaving = receiver.end or receiver.is_deaf
            may_lose = is_leaving or "discard" in receiver.modes.values()
            require(may_lose or not is_lost, f"BLOCK-4: {name} loses a packet")

            limit = max(size, self.bus.options.max_backlog)
            is_over = receiver.backlog_bytes > limit
            number = self.clients[publisher].number if publisher else 0
            is_paused = number in receiver.holds
            require(is_paused or not is_over, f"BLOCK-10: {name} has too much")

    def check_freed(self, before: set[tuple[str, str, model.Hold]]) -> None:
        """Raise Violation if a publisher goes on too early."""
        for holder, publisher, hold in before - self.holds():
            client, other = self.clients[holder], self.clients[publisher]
            is_left = client.modes[hold.mode] != "block"
            is_low = client.backlog_bytes <= hold.end_bytes
            may_go = is_left or is_low or client.end or other.end
            rule = RULES[hold.mode]
            require(may_go, f"{rule}: {publisher} goes on too early")

    def check(self) -> None:
        """Raise Violation if this state breaks a rule."""
        for name, client in self.clients.items():
            for number, hold in client.holds.items():
                may = model.may_pause(client, self.bus.clients[number])
                require(may, f"BLOCK-13: {name} may not hold {number}")
                is_block = client.modes[hold.mode] == "block"
                require(is_block, f"BLOCK-22: {name} has left {hold.mode}")
                waits = client.backlog_bytes > hold.end_bytes
                require(waits, f"{RULES[hold.mode]}: {name} holds for nothing")
            is_free = not (client.holds or client.backlog)
            require(is_free or not client.end, f"CONN-6: {name} holds on")
            self.check_order(name, client)
        twin = self.copy()
        require(twin.all_go_on(), "BLOCK-12: not all go on, though all read")
        if self.is_deadlock():
            twin = self.copy()
            require(twin.time_helps(), "BLOCK-16: they wait for ever")

    def check_order(self, name: str, client: model.Client) -> None:
        """Raise Violation if packets of a publisher are out of order.

        Those whose payloads begin with its number and a full stop count.
        """
        packets = [*client.received, *(m.packet for m in client.backlog)]
        for sender in self.clients.values():
            mark = b"\0%d." % sender.number
            numbers = [p.partition(mark)[2] for p in packets if mark in p]
            is_sorted = numbers == sorted(numbers)
            is_other = client.modes["order"] != "queue"
            require(is_sorted or is_other, f"PUB-6: {name} has {numbers}")

    def copy(self) -> CheckedWorld:
        """Return a world that can go another way."""
        twin = super().copy()
        assert isinstance(twin, CheckedWorld)
        return twin

    def all_go_on(self) -> bool:
        """Have all read; return whether nobody stays paused."""
        for _ in range(READS_MAX):
            for client in self.clients.values():
                client.received.clear()
                if client.backlog:
                    model.drain(self.bus, client)
            for number in self.bus.ready()[:1]:
                model.handle(self.bus, self.bus.clients[number])
            for name in sorted(self.blocked):
                if not self.clients[name].sent:
                    self.take("act", name)
            clients = self.bus.clients.values()
            if not any(c.backlog or c.sent or c.received for c in clients):
                break
        return not self.is_held()

    def time_helps(self) -> bool:
        """Return whether the block time ends a deadlock."""
        for _ in self.clients:
            # One after another, as the rule does not say which is first
            for client in self.clients.values():
                client.since = self.bus.now - 1 / client.number
            if self.is_deadlock():
                self.bus.wait(self.bus.options.block_timeout)
        return not self.is_deadlock()
