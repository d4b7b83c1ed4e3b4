"""Holds requests that wait for a replica's slots, and decides which is next.

Knows no HTTP, and a request as a turn and a count of tokens.

Lanes weigh 16:4:1, tenants in a lane what their plans say. Charged is the input when a request is
served and the output as it comes, so whoever asks for little is served more often. While a slot is
free nobody waits; nobody is promoted by age. Each gateway process has rooms of its own, before
slots that all of them may share (`slots`).
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable

from engine.fairness import INPUT_COST, LANE_WEIGHTS, OUTPUT_COST, FairShare, QueueBound
from engine.protocol import Lane
from gateway.fleet.errors import NoSlot
from gateway.fleet.slots import OwnSlots, Slots
from gateway.generation_events import MeteredUsage
from gateway.lanes import Priority

MAX_WAITING = 1024
"""The bound of each lane's queue. One more request is refused; before that, one more of the tenant
with the most waiting."""
MAX_WAIT_S = 600.0
"""The longest wait if neither the lane nor the client has a deadline; the official SDK waits as
long."""
MAX_RETRY_AFTER_S = 60.0
SMOOTHING = 0.2
"""Weight of the newest measurement in the moving averages."""


class QueueTicket:
    """A request in a waiting room, from its coming to its leaving."""

    __slots__ = ("came_at", "charged", "input_tokens", "priority", "served", "served_at", "slot")

    def __init__(self, priority: Priority, input_tokens: int, now: float) -> None:
        self.priority = priority
        self.input_tokens = input_tokens
        self.charged = 0
        self.came_at = now
        self.served_at: float | None = None
        """None: it waits."""
        self.slot = -1
        """The slot that it holds once it is served."""
        self.served = asyncio.Event()


class _Queue:
    """The queue of one tenant in one lane; never empty."""

    __slots__ = ("tickets", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        """The weight that its first request came with."""
        self.tickets: OrderedDict[QueueTicket, None] = OrderedDict()


class WaitingRoom:
    """`join`, then `used` as it is served, then `leave`, which is owed by whoever joined. `clock`:
    monotonic seconds."""

    def __init__(
        self,
        max_concurrency: int,
        *,
        max_waiting: int = MAX_WAITING,
        clock: Callable[[], float] = time.monotonic,
        slots: Slots | None = None,
    ) -> None:
        """slots: shared ones, of which this process' part is `max_concurrency`."""
        assert max_concurrency >= 1
        self._slots = slots or OwnSlots(max_concurrency)
        self._next_look: asyncio.TimerHandle | None = None
        self.max_concurrency = max_concurrency
        self._bounds = {lane: QueueBound(max_waiting) for lane in LANE_WEIGHTS}
        self._clock = clock
        self._share = FairShare()
        self._queues: dict[Lane, dict[str, _Queue]] = {lane: {} for lane in LANE_WEIGHTS}
        self._weights: dict[Lane, float] = dict.fromkeys(LANE_WEIGHTS, 0.0)
        """The total weight of the waiting tenants, by lane."""
        self.num_waiting: dict[Lane, int] = dict.fromkeys(LANE_WEIGHTS, 0)
        self.num_served: dict[Lane, int] = dict.fromkeys(LANE_WEIGHTS, 0)
        self._service_s: float | None = None
        """How long a slot is taken, lately; None: not known yet."""
        self._first_s = 0.0
        """The time from being served to the first token, lately."""

    @property
    def _num_slots(self) -> int:
        """Return the number of slots: its part, or what it was lent beyond."""
        return max(self.max_concurrency, self._slots.num_taken)

    @property
    def backlog(self) -> float:
        """Return 0 if the next one would be served at once; otherwise more, the longer it would
        wait."""
        if self._has_free():
            return 0.0
        return (1 + sum(self.num_waiting.values())) / self._num_slots

    def predicted_ttft_s(self, priority: Priority) -> float | None:
        """Predict the time to first token of a request that would come now; None: nobody knows. As
        if all requests took equally long, and all counters were equal: who waits in other lanes and
        of other tenants comes before it as far as their weights go."""
        if self._has_free():
            return 0.0  # it may try; how long the upstream takes is not held against it
        if self._service_s is None:
            return None
        lane = priority.lane
        mine = self._queues[lane].get(priority.tenant)
        weight = priority.weight if mine is None else mine.weight
        weights = self._weights[lane] + (weight if mine is None else 0.0)
        own = 1 if mine is None else 1 + len(mine.tickets)
        ahead = min(self.num_waiting[lane] + 1.0, own * weights / weight)
        for other, number in self.num_waiting.items():
            if other != lane:
                ahead += min(number, own * LANE_WEIGHTS[other] / LANE_WEIGHTS[lane])
        return ahead * self._service_s / self._num_slots + self._first_s

    def join(self, priority: Priority, input_tokens: int) -> QueueTicket:
        """Raises: NoSlot."""
        lane = priority.lane
        bound = self._bounds[lane]
        if not bound.has_room(priority.tenant):
            raise NoSlot(
                f"{bound.num_taken} requests wait in lane {lane}, none is left for its tenant",
                retry_after_s=self.retry_after_s(),
            )
        ticket = QueueTicket(priority, input_tokens, self._clock())
        queue = self._queues[lane].get(priority.tenant)
        if queue is None:
            queue = self._queues[lane][priority.tenant] = _Queue(priority.weight)
            self._weights[lane] += priority.weight
        queue.tickets[ticket] = None
        self.num_waiting[lane] += 1
        bound.take(priority.tenant)
        self._share.enter(lane, priority.tenant)
        self._share.wait(lane, priority.tenant)
        self._serve()
        return ticket

    def began(self, ticket: QueueTicket) -> None:
        """Note that the request's first token is here."""
        assert ticket.served_at is not None
        self._first_s += SMOOTHING * (self._clock() - ticket.served_at - self._first_s)

    def used(self, ticket: QueueTicket, usage: MeteredUsage) -> None:
        """Charge what was used so far. What was estimated too high at first is charged off against
        what follows."""
        cost = INPUT_COST * (usage.uncached_input + usage.cache_write) + OUTPUT_COST * usage.output
        self._charge(ticket, cost)

    def leave(self, ticket: QueueTicket) -> None:
        """Leave the room and give the slot back: it has been served, or waits no longer."""
        lane = ticket.priority.lane
        if ticket.served_at is None:
            self._unqueue(ticket)
        else:
            self.num_served[lane] -= 1
            self._slots.give_back(ticket.slot)
            took_s = self._clock() - ticket.served_at
            known = took_s if self._service_s is None else self._service_s
            self._service_s = known + SMOOTHING * (took_s - known)
        self._share.leave(lane, ticket.priority.tenant)
        self._serve()

    def retry_after_s(self) -> float:
        """Return when it may be worth another try: a round of the slots later."""
        return min(MAX_RETRY_AFTER_S, max(1.0, self._service_s or 0.0))

    def close(self) -> None:
        """Close: nobody is served any more."""
        if self._next_look is not None:
            self._next_look.cancel()
        self._slots.close()

    def _has_free(self) -> bool:
        return not any(self.num_waiting.values()) and self._slots.is_any_free()

    def _serve(self) -> None:
        while (first := self._share.first()) is not None:
            slot = self._slots.take()
            if slot is None:
                self._look_again()
                return
            lane, tenant = first
            ticket = next(iter(self._queues[lane][tenant].tickets))
            self._unqueue(ticket)
            self.num_served[lane] += 1
            ticket.slot, ticket.served_at = slot, self._clock()
            self._charge(ticket, INPUT_COST * ticket.input_tokens)
            ticket.served.set()

    def _look_again(self) -> None:
        """Schedule another look, as somebody waits: another process may have given a slot back by
        then."""
        if self._slots.look_again_s is not None and self._next_look is None:
            loop = asyncio.get_running_loop()
            self._next_look = loop.call_later(self._slots.look_again_s, self._look)

    def _look(self) -> None:
        self._next_look = None
        self._serve()

    def _unqueue(self, ticket: QueueTicket) -> None:
        lane, tenant = ticket.priority.lane, ticket.priority.tenant
        queues = self._queues[lane]
        queue = queues[tenant]
        del queue.tickets[ticket]
        if not queue.tickets:
            del queues[tenant]
            self._weights[lane] = self._weights[lane] - queue.weight if queues else 0.0
        self.num_waiting[lane] -= 1
        self._bounds[lane].give_back(tenant)
        self._share.unwait(lane, tenant)

    def _charge(self, ticket: QueueTicket, cost: int) -> None:
        if cost > ticket.charged:
            priority = ticket.priority
            self._share.charge(
                priority.lane, priority.tenant, priority.weight, cost - ticket.charged
            )
            ticket.charged = cost

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counts tell one story; for tests."""
        for lane, queues in self._queues.items():
            assert all(queue.tickets for queue in queues.values()), "an empty queue"
            waiting = sum(len(queue.tickets) for queue in queues.values())
            assert self.num_waiting[lane] == waiting, f"lane {lane}: miscounted"
            tenants = [tenant for tenant, queue in queues.items() for _ in queue.tickets]
            self._bounds[lane].check_integrity(tenants)
            assert self._share.is_waiting(lane) == bool(waiting), f"lane {lane}: who waits?"
            weights = sum(queue.weight for queue in queues.values())
            assert abs(self._weights[lane] - weights) < 1e-6, f"lane {lane}: weights"
        assert self._slots.num_taken == sum(self.num_served.values()), "slots miscounted"
        if self._slots.look_again_s is None:
            num_free = self.max_concurrency - self._slots.num_taken
            assert num_free >= 0, "more are served than may be"
            assert not num_free or not any(self.num_waiting.values()), "a free slot, and waiters"
