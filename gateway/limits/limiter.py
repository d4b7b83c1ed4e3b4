"""Two-phase limits: reserve before a request runs, extend while it writes, settle what it used.

It knows no HTTP and no price, and keeps nothing that another gateway would miss.

For each key, OAuth client, project and organization, and for a key or a project with one model, a
plan may limit tokens, input tokens, output tokens and requests per minute, batch tokens per day,
and open leases ("streams"). `admit` takes the input and the output the key usually writes from all
of them or from none. The bound: with r = limit / 60 per second and a burst B of a sixth of the
limit, any 60 seconds let pass at most B + 60 r tokens, counting each request at its admission with
what it used of its reservation. A request larger than B, but not than the limit, passes when the
bucket is full and leaves debt; its size then stands for B.

What a request writes beyond its reservation it takes in steps of at most STEP_TOKENS (`extend`),
each counted when it is taken. A step that is not there becomes debt, and once a scope's debt
reaches B its streams rest until it is paid. So in any 60 seconds they write at most 2 B + 60 r and
MAX_AHEAD_TOKENS for each stream: each may have a step in hand when the minute begins, and may take
one more before it hears of the debt. An upstream's streams cannot rest: of those it is
B + 60 r and what all that are open may write beyond their reservations (`allowance` says why).

The bound has a price: while what is reserved and will not be used exceeds B, part of the rate is
lost to the tenant. Reserving what a key usually writes, instead of max_tokens, keeps it far below.
With more than 64 leases open in one scope refunds are exact no more (`mark` in `ledger.lua`): each
may fall short by about a 64th of what the bucket lacks, which refills as anything does (of a whole
burst: 0.2 s). Modelled with 200 and 400 streams at four times what they use, under 1% of the rate.

Costs are whole microseconds of refill, rounded up, so the bound is exact up to 60 million per
minute and within one microsecond's refill above that.

A lease is renewed while its gateway lives, with what it has used so far. One that is not expires by
itself, at the next script that runs for its organization: its slot comes back, and of its tokens
what it is not known to have used. A settle that comes after all (the spool's recovery) is debited
for the difference, once: a settled lease is remembered as such for a while, and one without a
record is nobody's (`settle_lease`). Without any limit there is no lease, and Redis is not asked.

A hard cap on spending holds the whole cost of the input, and of all that may be written, at the
dearest prices; where the client did not say how much that is, it is what is left of the cap
(`spending`). Settled is what it cost. Counters that Redis has forgotten are built anew
(`counters`). While Redis is away, only what is far below its caps goes on (`outage_spending`).

A busy organization's requests are let pass from slices that its gateways hold of the buckets and of
what is left under caps, and Redis hears of many at once (`slices`); what is leased to a gateway has
been taken first, so the bounds are the same.

While Redis is away each gateway lets pass its share by itself (`local_buckets`), so that all of
them pass at most a fifth of B more than the bound; what of it has not refilled is debited when
Redis is back, and settles that came meanwhile follow (`outage`). A Redis that comes back empty
does not read as full buckets (`data_loss`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Literal

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from billing.events import PriceSet
from engine.protocol import Lane
from foundation.periodic import Periodic
from gateway.ids import uuid7
from gateway.limits.cell_parts import fitted_input, note_asked, refused_in_cell
from gateway.limits.cells.budgets import CellBudgets
from gateway.limits.counter_refresh import CounterRefresh
from gateway.limits.counters import (
    GRACE_S,
    IDLE_WATCH_S,
    WATCH_S,
    Books,
    Counters,
    DayBuckets,
    NoBooks,
    SpentUnknown,
)
from gateway.limits.funding import Funds, Lender, NoLender, OrgCounter
from gateway.limits.live_use import LiveUse, read_use
from gateway.limits.outcomes import (
    Admission,
    Refusal,
    Settlement,
    Units,
    bounded,
    holds_of,
    overspent,
    rate_state,
    refused,
    reservation,
    scopes_of,
    to_charges,
    to_script,
    without_streams,
)
from gateway.limits.output_forecast import ExpectedOutput
from gateway.limits.redis.data_loss import DataLossDetector, EverUsed, never
from gateway.limits.redis.keys import GATEWAYS, epoch_key, org_keys, scope_keys
from gateway.limits.redis.local_buckets import LocalBuckets
from gateway.limits.redis.outage import Outage, ScriptCall
from gateway.limits.redis.outage_spending import OutageSpending
from gateway.limits.redis.pipeline import Pipeline, QueueFull
from gateway.limits.redis.scope_limits import CounterCap, ScopeLimits
from gateway.limits.redis.scripts import LimiterUnavailable, ScriptFailed, Scripts
from gateway.limits.slices.ledger import MONEY, TTL_S, MoneyGrant, MoneySlice, SliceMiss
from gateway.limits.slices.slices import Slices
from gateway.limits.spending import Cap, counter_keys, spending_of
from gateway.principal import Principal

log = logging.getLogger(__name__)

OnUse = Callable[[str, Sequence[ScopeLimits], Units, Units], None]
"""A callback that gets an org, its scopes, what was taken from them, and what was given back."""
OnSlices = Callable[[Literal["admitted", "away"] | SliceMiss], None]
"""A callback that gets whether slices admitted a request, or why not."""
OnRefusal = Callable[[str, Sequence[Cap]], None]
"""A callback that gets an org and the caps that refused."""

LEASE_TTL_S = 60.0
RENEW_INTERVAL_S = LEASE_TTL_S / 3
RENEW_BATCH = 256
RETRY_S = 1.0
STEP_TOKENS = 32
MAX_AHEAD_TOKENS = 2 * STEP_TOKENS
"""How far one stream may run ahead: one step that is not yet accounted for, and one beyond the debt
at which sequences pause."""
NOTHING = Units()
SETTLEMENTS = tuple(Settlement)
"""By their numbers."""
MAX_MISSING = 16  # how often an admission may find that Redis lacks what it needs
RETURN_POLL_S = 0.03
"""Between two looks for what other gateways give back of their slices."""
MAX_RETURN_S = TTL_S + 0.5
"""The longest wait for that: by then a slice of a dead gateway has expired."""


class Extension(msgspec.Struct, frozen=True):
    """The answer to a stream that asked for more: how long it rests (0: it may go on), and whether
    its lease is open; one that expired or was settled limits it no more."""

    rest_s: float
    is_open: bool


class Limiter:
    """The limits of all tenants, as this process asks Redis for them. One per process. `redis` must
    not decode responses. `ever_used`: whether anybody ever used anything, as far as Postgres knows.
    `num_gateways`: at least so many share the limits. `books`: what was spent. `lender`: of what
    was paid in advance. `with_slices`: False asks Redis for each request. `clock`: Unix seconds.
    `monotonic` and `sleep`: of slices. `on_use` hears of what is taken and given back, `on_refusal`
    of caps that refuse, `on_refused` of each refusal, `on_slices` of each request that has limits;
    all wait for nothing."""

    def __init__(
        self,
        redis: Redis,
        *,
        ever_used: EverUsed = never,
        num_gateways: int = 1,
        books: Books | None = None,
        lender: Lender | None = None,
        grace_s: float = GRACE_S,
        with_slices: bool = True,
        cells: CellBudgets | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        on_use: OnUse = lambda org_id, scopes, taken, given_back: None,
        on_refusal: OnRefusal = lambda org_id, caps: None,
        on_refused: Callable[[Refusal], None] = lambda refusal: None,
        on_slices: OnSlices = lambda outcome: None,
    ) -> None:
        self._on_slices = on_slices
        self._on_use = on_use
        self._on_refusal, self._on_refused = on_refusal, on_refused
        self._ever_used, self._has_admitted = ever_used, False
        self._clock, self._monotonic, self._sleep = clock, monotonic, sleep
        self._with_slices = with_slices
        self._outputs = ExpectedOutput()
        self._local = LocalBuckets()
        self._local.num_gateways = num_gateways
        self._scripts = Scripts(redis, on_away=self._on_away)
        self._gateways = GatewayCount(self._scripts.pipeline, at_least=num_gateways)
        self._comfort = OutageSpending()
        self._outage = Outage(self._scripts, self._local)
        self._data_loss_detector = DataLossDetector(self._scripts.pipeline, self._was_ever_used)
        known = books or NoBooks()
        self.counters = Counters(self._scripts, known, self._was_ever_used, grace_s=grace_s)
        self.funds = Funds(self._scripts, lender or NoLender())
        self._days = DayBuckets(self._scripts.pipeline, known)
        self._open: dict[str, tuple[Admission, Units]] = {}
        """By lease id, what this process renews, and what it has used so far."""
        self._slices = Slices(
            self._scripts,
            defer=self._outage.defer,
            on_lost=lambda: self._periodic[0].wake(),
            on_money=self._hear_of_money,
            lease_ttl_s=lambda: LEASE_TTL_S,
            clock=monotonic,
        )
        self._cells = cells
        self._refresh = CounterRefresh(self.counters, clock=monotonic)
        if cells is not None:
            self._join_cells(cells)
        self._is_renewed = False
        self._periodic = [
            Periodic(
                "renew leases",
                lambda: RENEW_INTERVAL_S if self._is_renewed else RETRY_S,
                lambda: self._count_and_renew(),
                log=log,
                failure="leases not renewed",
                expected=(LimiterUnavailable,),
            ),
            Periodic(
                "watch for lost counters",
                lambda: WATCH_S if self._open else IDLE_WATCH_S,
                lambda: self._watch(),
                log=log,
                failure="not watched",
            ),
            self.funds.periodic_renewal(self._funded),
        ]

    def _join_cells(self, cells: CellBudgets) -> None:
        self.funds.share = lambda: cells.share
        cells.running = lambda: [(each.org_id, each.scopes) for each, _ in self._open.values()]

    async def start(self) -> None:
        if self._cells is not None:
            await self._cells.start()
        for periodic in self._periodic:
            periodic.start()
        if self._with_slices:
            self._slices.start()

    async def close(self) -> None:
        """Close; leases that are still open are left to expire."""
        if self._cells is not None:
            await self._cells.close()
        await self._slices.close()
        await self._outage.close()
        for periodic in self._periodic:
            await periodic.close()
        await self._refresh.close()
        await self.counters.close()
        await self.funds.close()

    def _funded(self) -> list[OrgCounter]:
        """Return the counters of the orgs whose requests run here on what they have paid in
        advance."""
        found = [funded_counter(admission) for admission, _ in self._open.values()]
        return [of for of in found if of is not None]

    @property
    def num_gateways(self) -> int:
        """Return how many share the limits, as far as this one knows."""
        return self._local.num_gateways

    def _on_away(self) -> None:
        self._slices.drop_all()
        self._outage.begins()

    async def admit(
        self,
        principal: Principal,
        model: str,
        *,
        input_tokens: int,
        max_output_tokens: int,
        lease_id: str,
        lane: Lane = "interactive",
        prices: PriceSet | None = None,
        min_output_tokens: int = 0,
        most_input_tokens: int | None = None,
        admitted_at: float | None = None,
        num_tool_calls: int = 0,
    ) -> Admission | Refusal:
        """Reserve over every scope or none. `lease_id` is made by the server, once per admission;
        repeating a call whose answer was lost reserves nothing twice. `prices`: those of the model
        at `admitted_at` (Unix seconds; None: now). `min_output_tokens`: where the client did not
        say how much may be written, the fewest tokens that make sense; then a hard cap lets it
        write what is left. 0: it did. `most_input_tokens`: whoever counts them; what a hard cap
        holds, where `input_tokens` is an estimate. `num_tool_calls`: it is nothing but these, and
        no stream.

        Raises: UnpricedModel, SpentUnknown (a hard cap binds it), ScriptFailed.
        """
        expected = self._outputs.expected(principal.key_id, model)
        scopes = scopes_of(principal, model, lane)
        if num_tool_calls:
            scopes = without_streams(scopes)
        asked_input = input_tokens
        if self._cells is not None:
            scopes = self._cells.parts_of(principal.org_id, scopes)
            asked_input = fitted_input(scopes, input_tokens)
        spending = None
        if principal.spend_caps:
            spending = spending_of(
                principal,
                model,
                prices or {},
                input_tokens=most_input_tokens or input_tokens,
                max_output_tokens=max_output_tokens,
                min_output_tokens=min_output_tokens,
                admitted_at=self._clock() if admitted_at is None else admitted_at,
                num_tool_calls=num_tool_calls,
            )
        if self._cells is not None and spending is not None:
            spending = msgspec.structs.replace(spending, share=self._cells.share)
        wanted = Admission(
            lease_id=lease_id,
            org_id=principal.org_id,
            key_id=principal.key_id,
            model=model,
            reserved=reservation(scopes, asked_input, min(max_output_tokens, expected)),
            max_output_tokens=max_output_tokens,
            scopes=scopes,
            state={},
            spending=spending,
        )
        if not wanted.has_lease:
            return wanted
        if self._cells is not None:
            note_asked(self._cells, wanted, input_tokens)
        return await self._admit_or_refuse(wanted)

    async def _admit_or_refuse(self, wanted: Admission) -> Admission | Refusal:
        """Raises: SpentUnknown, ScriptFailed."""
        if self._cells is not None:
            await self._refresh_counters(wanted)
        admission = self._admit_from_slices(wanted)
        if isinstance(admission, Admission):
            self._on_slices("admitted")
            return admission
        self._on_slices(admission)
        try:
            verdict = await self._admit(wanted)
        except ScriptFailed:
            raise
        except LimiterUnavailable:
            verdict = self._admit_locally(wanted)
        if isinstance(verdict, Refusal):
            if self._cells is not None:
                verdict = refused_in_cell(self._cells, wanted, verdict)
            self._on_refused(verdict)
        return verdict

    async def _refresh_counters(self, wanted: Admission) -> None:
        """See that what a cell counts has what the others have spent."""
        if wanted.spending is not None and not self._scripts.is_away:
            counters = [cap.counter for cap in wanted.spending.caps]
            if not self._refresh.are_fresh(wanted.org_id, counters):
                await self._refresh.refresh(wanted.org_id, counters, self.renew)

    async def _admit(self, wanted: Admission) -> Admission | Refusal:
        """Raises: LimiterUnavailable, SpentUnknown."""
        keys = [*org_keys(wanted.org_id), *scope_keys(wanted.org_id, wanted.scopes)]
        spending = wanted.spending
        if spending is not None:
            keys += counter_keys(wanted.org_id, spending.caps)
        reply: list[Any] = []
        for _ in range(MAX_MISSING):  # its epoch, its counters, days' buckets, its funding
            reply = await self._ask(wanted, keys)
            if reply[0] == 4:
                await self._data_loss_detector.begin(epoch_key(wanted.org_id))
            elif reply[0] == 5 and spending is not None:
                missing = [cap.counter for cap in spending.caps]
                await self.counters.build(wanted.org_id, missing, self.renew)
            elif reply[0] == 6:
                place = reply[1] - 1
                letter = reply[2].decode()
                await self._days.note(wanted.org_id, wanted.scopes[place], keys[3 + place], letter)
            elif reply[0] == 7 and (paying := funded_counter(wanted)) is not None:
                assert spending is not None
                await self.funds.fund(paying, wanted.model, spending.hold_nano)
            else:
                return self._to_verdict(wanted, reply)
        if reply[0] in (5, 7):
            raise SpentUnknown("Redis forgets its counters, or others take what was leased")
        raise LimiterUnavailable("Redis forgets its epochs")

    async def _ask(self, wanted: Admission, keys: list[str]) -> list[Any]:
        """Return the answer of `admit.lua`. Where what is missing lies in slices it is refused only
        if they do not come back. Raises: LimiterUnavailable."""
        asked, began = self._to_asked(wanted), self._monotonic()
        reply: list[Any] = await self._scripts.call("admit", keys, asked)
        while reply[0] == 8 and self._monotonic() - began < MAX_RETURN_S:
            await self._slices.exchange(wanted.org_id)
            await self._sleep(RETURN_POLL_S)
            reply = await self._scripts.call("admit", keys, asked)
        return reply

    def _admit_from_slices(self, wanted: Admission) -> Admission | SliceMiss | Literal["away"]:
        """Admit what the slices of its scopes have room for; all else is for Redis to decide."""
        lease_id, org_id = wanted.lease_id, wanted.org_id
        if self._scripts.is_away:
            return "away"
        if not self._slices.are_held(org_id) or (
            lease_id in self._open and not self._slices.is_young(org_id, lease_id)
        ):
            return "quiet"
        found = self._slices.admit(org_id, lease_id, *slices_asked(wanted))
        if isinstance(found, str):
            return found
        state = rate_state(wanted.scopes, *found)
        admission = msgspec.structs.replace(wanted, state=state, is_of_slices=True)
        self._begin(admission)
        return admission

    def _hear_of_money(self, org_id: str, part: MoneySlice, found: MoneyGrant) -> None:
        """Note what an exchange says of a counter, as an admission would."""
        if found.left_nano >= 0:
            self._comfort.note([part.key], [found.left_nano])
            if part.cap.is_funded:
                self.funds.serves((org_id, part.key), is_low=bool(found.is_short))

    def _to_verdict(self, wanted: Admission, reply: list[Any]) -> Admission | Refusal:
        """Read what `admit.lua` has answered."""
        spending = wanted.spending
        outcome, place, letter, wait_us, now_us, tokens, left, *buckets = reply
        assert outcome != 3, "a lease id is made once"
        state = rate_state(wanted.scopes, buckets, now_us)
        if spending is not None:
            self._comfort.note(counter_keys(wanted.org_id, spending.caps), left)
        if outcome in (0, 8):
            if letter == b"m":
                assert spending is not None
                amounts = tokens
                self._on_refusal(wanted.org_id, spending.exceeded(left, amounts))
                self._refresh.refused(wanted.org_id, [cap.counter for cap in spending.caps])
                return overspent(spending, place, amounts[place - 1], left[place - 1], state)
            wait_s = None if wait_us < 0 else wait_us / 1_000_000
            return refused(wanted.scopes[place - 1], letter.decode(), wait_s, state)
        admission = msgspec.structs.replace(wanted, state=state)
        if tokens >= 0:
            admission = msgspec.structs.replace(admission, max_output_tokens=tokens)
        if (paying := funded_counter(wanted)) is not None:
            self.funds.serves(paying, is_low=place > 0)
        self._begin(admission)
        if self._slices.count(admission.org_id):
            self._slices.note(admission.org_id, *slices_asked(admission))
        return admission

    def _to_asked(self, wanted: Admission) -> Any:
        money: tuple[list[Any], list[Any]] = ([], [])
        if wanted.spending is not None:
            is_short = self.funds.is_short(wanted.org_id, wanted.model)
            money = wanted.spending.to_script(is_final=is_short)
        return (
            wanted.lease_id,
            int(LEASE_TTL_S * 1_000_000),
            wanted.reserved.by_letter(requests=1),
            [to_script(scope) for scope in wanted.scopes],
            *money,
        )

    async def _was_ever_used(self) -> bool:
        """Tell whether anybody ever used anything: what this process has let pass may be in no
        spool yet."""
        return self._has_admitted or await self._ever_used()

    def _begin(self, admission: Admission) -> None:
        """Note an admission once, however often it is asked for."""
        self._has_admitted = True
        if admission.lease_id not in self._open:
            self._open[admission.lease_id] = (admission, NOTHING)
            self._on_use(admission.org_id, admission.scopes, admission.reserved, NOTHING)

    def _admit_locally(self, wanted: Admission) -> Admission | Refusal:
        """Admit what this gateway may let pass by itself. Raises: SpentUnknown."""
        if wanted.spending is not None:
            names = counter_keys(wanted.org_id, wanted.spending.caps)
            hold = wanted.spending.hold_nano
            if not self._comfort.allows(names, hold, self._local.num_gateways):
                raise SpentUnknown("Redis is away")
            self._comfort.take(names, hold)
        keys, units = (
            scope_keys(wanted.org_id, wanted.scopes),
            wanted.reserved.by_letter(requests=1),
        )
        found = self._local.admit(keys, wanted.scopes, units)
        if found is not None:
            by = wanted.scopes[found.place]
            wait_s = None if found.wait_s == math.inf else found.wait_s
            return refused(by, found.letter, wait_s, wanted.state)
        self._has_admitted = True
        self._on_use(wanted.org_id, wanted.scopes, wanted.reserved, NOTHING)
        return msgspec.structs.replace(wanted, is_local=True)

    async def extend(
        self, admission: Admission, *, output_tokens: int, used: Units, resting: bool
    ) -> Extension:
        """Take `output_tokens` more, there or not. `used`: so far. `resting`: the last answer was
        to rest, which only ends when no debt is left. Raises: LimiterUnavailable."""
        assert 0 <= output_tokens <= STEP_TOKENS, f"a step of {output_tokens} tokens"
        more = Units(output_tokens=output_tokens)
        lease_id, org_id = admission.lease_id, admission.org_id
        if self._slices.is_young(org_id, lease_id) and await self._slices.extend(
            org_id, lease_id, more.by_letter()
        ):
            return Extension(rest_s=0.0, is_open=True)
        asked = (lease_id, more.by_letter(), used.by_letter(), int(resting))
        reply = await self._scripts.call("extend", org_keys(admission.org_id), [asked])
        rest_us = reply[0]
        return Extension(rest_s=max(0, rest_us) / 1_000_000, is_open=rest_us >= 0)

    def progress(self, admission: Admission, used: Units) -> None:
        """Record what a running request has used so far: should its gateway die, this is kept."""
        if admission.lease_id in self._open:
            if admission.spending is not None:
                cost = admission.spending.cost_nano(used.input_tokens, used.output_tokens)
                used = msgspec.structs.replace(used, cost_nano=cost)
            self._open[admission.lease_id] = (admission, used)

    async def settle(self, admission: Admission, used: Units) -> Settlement:
        """Refund what was reserved and not used, or take what was used beyond it. Idempotent by
        lease. While Redis is away it is DEFERRED."""
        is_new = not admission.has_lease or admission.is_local or admission.lease_id in self._open
        if is_new and admission.max_output_tokens:  # what may write nothing tells nothing
            self._outputs.note(admission.key_id, admission.model, used.output_tokens)
        return await self._close(admission, used, requests=1)

    async def void(self, admission: Admission) -> Settlement:
        """Give back the tokens and the request: nothing ran."""
        return await self._close(admission, NOTHING, requests=0)

    async def settle_lease(self, org_id: str, lease_id: str, used: Units) -> Settlement:
        """Settle what another process admitted, and did not live to settle. Its record says what is
        to be debited, however long ago that was. Without one Redis was emptied after its gateway
        had last renewed it, so nearly all use was before the epoch (`data_loss`): UNKNOWN."""
        asked: Any = (lease_id, bounded(used).by_letter(requests=1), [])
        return await self._settle(lease_id, ScriptCall(org_keys(org_id), asked))

    async def void_lease(self, org_id: str, lease_id: str) -> Settlement:
        """Give back the tokens and the request of a lease that nobody is billed for."""
        asked: Any = (lease_id, NOTHING.by_letter(requests=0), [])
        return await self._settle(lease_id, ScriptCall(org_keys(org_id), asked))

    async def use_now(self, org_id: str, scopes: Sequence[ScopeLimits]) -> LiveUse:
        """Return how much of these limits is used and held, for people to look at. Raises:
        LimiterUnavailable."""
        if self._cells is not None:
            scopes = self._cells.parts_of(org_id, scopes)
        return await read_use(self._scripts, org_id, scopes)

    async def _close(self, admission: Admission, used: Units, *, requests: int) -> Settlement:
        if not admission.has_lease:
            return Settlement.UNLIMITED
        # Whatever comes of the call, this process is done with the lease.
        was_open = self._open.pop(admission.lease_id, None) is not None
        if was_open or admission.is_local:
            self._on_use(admission.org_id, admission.scopes, used, admission.reserved)
        elif admission.is_of_slices or self._slices.is_closing(
            admission.org_id, admission.lease_id
        ):
            return Settlement.REPLAYED
        names = scope_keys(admission.org_id, admission.scopes)
        units = bounded(used).by_letter(requests=requests)
        if admission.is_local:
            taken = admission.reserved.by_letter(requests=1)
            if self._scripts.is_away:
                self._local.settle(names, admission.scopes, taken, units)
                return Settlement.SETTLED  # the debit will say it
            self._local.settle(names, admission.scopes, taken, taken)
            # The debit has said what was taken.
            units = {each: max(0, units[each] - taken[each]) for each in units}
        counters: list[str] = []
        if admission.spending is not None:
            counters = counter_keys(admission.org_id, admission.spending.caps)
            names += counters

        def to_call(told: dict[str, int]) -> ScriptCall:
            keys = [*org_keys(admission.org_id), *names]
            buckets = [[each for each in scope.buckets if each.limit] for scope in admission.scopes]
            return ScriptCall(keys, (admission.lease_id, told, buckets))

        if was_open and self._slices.settle(
            admission.org_id, admission.lease_id, units, to_call, counters
        ):
            return Settlement.SETTLED
        call, paid = to_call(units), self._slices.take_covered(admission.lease_id)
        if paid:
            call = ScriptCall(call.keys, (*call.asked, paid))
        return await self._settle(admission.lease_id, call)

    async def _settle(self, lease_id: str, call: ScriptCall) -> Settlement:
        try:
            number: int = await self._scripts.call("settle", call.keys, call.asked)
            return SETTLEMENTS[number]
        except ScriptFailed:
            return Settlement.FAILED
        except LimiterUnavailable:
            self._outage.defer(lease_id, call)
            return Settlement.DEFERRED

    async def _count_and_renew(self) -> None:
        """Raises: LimiterUnavailable; then the next round comes after RETRY_S."""
        self._is_renewed = False
        await self.count_gateways()
        await self.renew()
        self._is_renewed = True

    async def _watch(self) -> None:
        """Tell a Redis that has lost what it knew what runs here, and what is in the books."""
        try:
            _, has_changed = await asyncio.gather(
                self._data_loss_detector.watch(), self.counters.has_changed()
            )
            if has_changed:
                await self.renew()
            await self.counters.book_the_rest()
        except (LimiterUnavailable, OSError) as error:
            log.debug("not watched: %s", error)  # a warning each WATCH_S would flood the log

    async def count_gateways(self) -> None:
        """Count the gateways that share the limits, this one included. Raises:
        LimiterUnavailable."""
        counted = await self._gateways.count(heard_within_s=3 * RENEW_INTERVAL_S)
        self._local.num_gateways = counted

    async def renew(self) -> int:
        """Put off the expiry of this process' open leases, or open them again; then what ran on
        slices that were dropped has leases, too. Returns how many were still open. Raises:
        LimiterUnavailable."""
        dropped = [] if self._outage.has_deferred else self._slices.dropped()
        by_org: dict[str, list[Any]] = {}
        for lease_id, (admission, used) in self._open.items():
            if self._slices.is_young(admission.org_id, lease_id):
                continue
            units, paid = used.by_letter(), self._slices.covered(lease_id)
            if paid:
                units = {kind: max(amount, paid.get(kind, 0)) for kind, amount in units.items()}
            lease = (lease_id, units, to_charges(admission), holds_of(admission))
            by_org.setdefault(admission.org_id, []).append(lease)
        renewed = 0
        for org_id, leases in by_org.items():
            remaining = iter(leases)
            while batch := list(islice(remaining, RENEW_BATCH)):
                asked = (int(LEASE_TTL_S * 1_000_000), batch)
                with suppress(ScriptFailed):  # it was logged; others' leases are renewed
                    renewed += await self._scripts.call("renew", org_keys(org_id), asked)
                    for lease_id, *_ in batch:
                        self._slices.renewed(lease_id)
        await self._slices.release(dropped)
        return renewed


def slices_asked(
    admission: Admission,
) -> tuple[list[str], tuple[ScopeLimits, ...], dict[str, int], list[CounterCap]]:
    """Return what a request takes of slices: its scopes' keys and limits, its units, its caps."""
    units, spending = admission.reserved.by_letter(requests=1), admission.spending
    keys, caps = scope_keys(admission.org_id, admission.scopes), list[CounterCap]()
    if spending is not None:
        units[MONEY] = min(spending.hold_nano, spending.most_nano(admission.max_output_tokens))
        names = counter_keys(admission.org_id, spending.caps)
        caps = [
            CounterCap(name, cap.amount_nano, cap.is_funded, spending.share)
            for name, cap in zip(names, spending.caps, strict=True)
        ]
    return keys, admission.scopes, units, caps


def funded_counter(admission: Admission) -> OrgCounter | None:
    """Return the counter of an org that has paid in advance."""
    funded = admission.spending and admission.spending.funded
    return (admission.org_id, funded.counter.key(admission.org_id)) if funded else None


class GatewayCount:
    """Counts the gateways that share the limits.

    One per process. `at_least`: so many there are, heard of or not.
    """

    def __init__(self, pipeline: Pipeline, *, at_least: int) -> None:
        self._pipeline, self._at_least = pipeline, at_least
        self._id = uuid7().hex

    async def count(self, *, heard_within_s: float) -> int:
        """Return how many were heard, this one included. Raises: LimiterUnavailable."""
        call = self._pipeline.call
        try:
            now = int((await call(("TIME",)))[0])
            await call(("ZADD", GATEWAYS, str(now), self._id))
            await call(("ZREMRANGEBYSCORE", GATEWAYS, "-inf", str(now - heard_within_s)))
            counted: int = await call(("ZCARD", GATEWAYS))
        except (RedisError, OSError, QueueFull) as error:
            raise LimiterUnavailable(f"count gateways: {type(error).__name__}") from error
        return max(self._at_least, counted)
