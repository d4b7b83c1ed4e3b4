"""The services that `trust` uses: rules, the memory of calls, their records and their meter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import msgspec

from mcp_bridge.caller import Caller
from mcp_bridge.trust.policy import CallState, ToolRule, checked_rules, policy_version

if TYPE_CHECKING:
    from mcp_bridge.routing.guard import Outcome

ALLOWS_ALL = ToolRule(id="default", effect="allow")
"""The rule of an org without rules: every approved tool may be called."""


class Rules(msgspec.Struct, frozen=True):
    rules: tuple[ToolRule, ...]
    version: str

    @classmethod
    def of(cls, rules: Iterable[ToolRule]) -> Rules:
        """Raises: PolicyRefused."""
        found = checked_rules(rules) or (ALLOWS_ALL,)
        return cls(found, policy_version(found))

    @classmethod
    def stored(cls, rules: Iterable[ToolRule]) -> Rules:
        """Return rules that were checked when they were written: those that would be refused today
        stay valid, and a condition that may cost too much counts as not evaluated."""
        found = tuple(sorted(rules, key=lambda rule: rule.id)) or (ALLOWS_ALL,)
        return cls(found, policy_version(found))


class RuleSource(Protocol):
    async def rules(self, org_id: str) -> Rules: ...


class CountOutcome(msgspec.Struct, frozen=True):
    """The result of counting a call.

    `full`: it was not counted, and why. `at_s`: seconds since the epoch.
    """

    at_s: float = 0.0
    full: CallState | None = None


class CallMemory(Protocol):
    """The memory of calls, between workers."""

    @property
    def taints(self) -> bool:
        """True if anybody's results can be from a server that taints."""
        ...

    async def take(
        self, org_id: str, rules: Iterable[ToolRule], call_id: str, cost_pico: int
    ) -> CountOutcome:
        """Count a call under every rule that has a rate or a budget, or under none."""
        ...

    async def give_back(
        self, org_id: str, rules: Iterable[ToolRule], cost_pico: int, taken: CountOutcome
    ) -> None:
        """Give back the money of a call that costs nothing after all; its rate stays counted."""
        ...

    async def tainted_by(self, caller: Caller) -> tuple[str, ...]: ...

    async def taint(self, caller: Caller, server: str) -> None: ...

    async def once(self, org_id: str, key: str, ttl_s: float) -> bool:
        """True if this is the first time."""
        ...


class CallRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A call as it is audited and billed: of arguments the digest, of results nothing.
    `offer_age_s`: how long before the server was asked whether its tool is the approved one; None:
    for this call."""

    id: str
    caller: Caller
    server: str
    tool: str
    alias: str
    pin: str
    arguments_digest: str
    rules: tuple[str, ...]
    approval_id: str | None = None
    continues: bool = False
    offer_age_s: float | None = None


class ReadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a resource that is read or subscribed to, a prompt, or a completion of one.
    `name`: at its server, or a URI. `offer_age_s`: of a prompt, as that of a call."""

    id: str
    caller: Caller
    server: str
    method: str
    name: str
    rules: tuple[str, ...]
    offer_age_s: float | None = None


class Denial(msgspec.Struct, frozen=True, kw_only=True):
    caller: Caller
    server: str
    name: str
    reason: str
    method: str = "tools/call"
    rules: tuple[str, ...] = ()


class Records(Protocol):
    async def listed(
        self, caller: Caller, server: str, method: str, count: int, stale: bool
    ) -> None: ...

    async def denied(self, denial: Denial) -> None: ...

    async def read(self, read: ReadRecord, outcome: Outcome) -> None: ...

    async def opened(self, call: CallRecord) -> None:
        """Put a call on record before anything goes out.

        Raises: RpcError, where it cannot be recorded.
        """
        ...

    async def closed(self, call: CallRecord, outcome: Outcome) -> None: ...


class Ticket(Protocol):
    """An admitted call, which its caller pays for if it is made."""

    @property
    def cost_pico(self) -> int: ...

    async def begun(self) -> None:
        """Note that the call goes out now. Raises: RpcError, if it could not be accounted for."""
        ...

    async def ended(self, outcome: Outcome | None) -> bool:
        """End the ticket, once, and return whether the call is paid for. `outcome` None: it did not
        go out. Raises: RpcError, if that could not be stored."""
        ...


class Meter(Protocol):
    """Admits calls by the limits of their caller, and prices them."""

    async def admit(self, call: CallRecord) -> Ticket:
        """Raises: RpcError."""
        ...

    async def count(self, read: ReadRecord) -> None:
        """Count a request that costs nothing. Raises: RpcError."""
        ...
