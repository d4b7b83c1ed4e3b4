"""Approves one call by a person, and nothing else.

An approval is bound to tenant, caller, server, the pin of the tool, the digest of the arguments,
the version of the rules, who may give it, a time and a nonce. It is used once: by one call, with
that call's continuations (multi round-trip requests, MCP 2026-07-28). Whatever of the binding is
other by then, it is of no use.

    pending -> approved -> used
       |          `-----> expired
       |-> denied
       `-> expired

The transitions are pure. `Approvals` makes them over an `ApprovalStore`, which writes a row and its
audit event together and only if nobody was faster. `MemoryApprovals` is one for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import msgspec

from mcp_bridge.canonical_json import (
    digest,
    digest_of_bytes,
    has_lone_surrogate,
    pointer,
    short_json,
    walk,
)
from mcp_bridge.errors import ApprovalRefused, NotCanonical
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.rpc import APPROVAL_NEEDED, DENIED, RpcError

Decider = Literal["administrator", "caller"]
ApprovalState = Literal["pending", "approved", "denied", "used", "expired"]
Happened = Literal["approval.requested", "approval.decided", "approval.used", "approval.expired"]
Refused = Literal[
    "unknown", "pending", "denied", "expired", "used", "other_call", "own_request", "decided"
]

MAX_TTL_S = 24 * 3600
MAX_PENDING = 1_000
"""Per org: a flood is refused instead of displacing other requests."""
MAX_ATTEMPTS = 8
MAX_SHOWN_BYTES = 64 * 1024
"""Longer arguments, as JSON, are not shown to the person who decides."""


class ApprovedCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The call that an approval is about."""

    org_id: str
    caller: str
    server: str
    pin: str
    """Digest of the pinned tool."""
    arguments_digest: str
    """Digest of the bytes of the arguments, as they were shown and go out."""
    policy_version: str
    decider: Decider = "administrator"
    """The approver; an administrator may also approve what waits for the caller."""

    def key(self) -> str:
        return digest(msgspec.to_builtins(self))


class Approval(msgspec.Struct, frozen=True, kw_only=True):
    """A request for approval and what became of it; times are seconds since the epoch."""

    id: str
    call: ApprovedCall
    nonce: str
    tool: str = ""
    """The name of the tool that `call.pin` is the digest of."""
    requested_at_s: float
    expires_at_s: float
    state: ApprovalState = "pending"
    decided_by: str = ""
    used_by: str = ""
    """Id of the call that used it: its continuations may come again."""


class ApprovalEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A transition of an approval, for the audit log. Arguments are there as their digest only."""

    event: Happened
    approval_id: str
    org_id: str
    at_s: float
    actor: str
    state: ApprovalState
    call: ApprovedCall


class ApprovalTransition(msgspec.Struct, frozen=True):
    approval: Approval
    event: ApprovalEvent


Outcome = ApprovalTransition | Refused


def arguments_digest(arguments: Mapping[str, object]) -> str:
    """Return the digest of the bytes that a person is shown and that go out: of 5 it is another
    than of 5.0, and so it is of another order of keys or form of Unicode. Raises: NotCanonical,
    past the bounds of a document."""
    if short_json(arguments) is None:
        for parts, one in walk(arguments):
            if isinstance(one, str) and has_lone_surrogate(one):
                raise NotCanonical(pointer(parts), "a lone surrogate")
    return digest_of_bytes(rpc.encode(dict(arguments)))


def requested(
    call: ApprovedCall,
    *,
    approval_id: str,
    nonce: str,
    now_s: float,
    ttl_s: float,
    tool: str = "",
) -> ApprovalTransition:
    """Return a new request. ApprovalRefused for a time to live of nothing or more than a day."""
    if not 0 < ttl_s <= MAX_TTL_S:
        raise ApprovalRefused(f"an approval lives up to {MAX_TTL_S} s, not {ttl_s}")
    approval = Approval(
        id=approval_id,
        call=call,
        nonce=nonce,
        tool=tool,
        requested_at_s=now_s,
        expires_at_s=now_s + ttl_s,
    )
    return moved(approval, "approval.requested", now_s, call.caller)


def moved(approval: Approval, event: Happened, now_s: float, actor: str) -> ApprovalTransition:
    return ApprovalTransition(
        approval,
        ApprovalEvent(
            event=event,
            approval_id=approval.id,
            org_id=approval.call.org_id,
            at_s=now_s,
            actor=actor,
            state=approval.state,
            call=approval.call,
        ),
    )


def expired(approval: Approval, now_s: float) -> ApprovalTransition | None:
    """Return the transition of an approval whose time is over, or None."""
    if approval.state not in ("pending", "approved") or now_s < approval.expires_at_s:
        return None
    late = msgspec.structs.replace(approval, state="expired")
    return moved(late, "approval.expired", now_s, "")


def decided(approval: Approval, *, approve: bool, by: str, now_s: float) -> Outcome:
    """Return the decision of `by`. A caller does not approve its own request unless the rules allow
    it: an agent that holds its own key would approve itself."""
    late = expired(approval, now_s)
    if late is not None:
        return late
    if approval.state != "pending":
        return "expired" if approval.state == "expired" else "decided"
    if by == approval.call.caller and approval.call.decider != "caller":
        return "own_request"
    state: ApprovalState = "approved" if approve else "denied"
    answered = msgspec.structs.replace(approval, state=state, decided_by=by)
    return moved(answered, "approval.decided", now_s, by)


def used(
    approval: Approval, call: ApprovedCall, *, nonce: str, call_id: str, now_s: float
) -> Outcome:
    """Use the approval for `call_id`. Used again for the same call, as by its continuation, it
    stays as it is."""
    if approval.call != call or approval.nonce != nonce:
        return "other_call"
    if approval.state == "used":
        return (
            moved(approval, "approval.used", now_s, call.caller)
            if (approval.used_by == call_id)
            else "used"
        )
    late = expired(approval, now_s)
    if late is not None:
        return late
    if approval.state != "approved":
        return approval.state
    spent = msgspec.structs.replace(approval, state="used", used_by=call_id)
    return moved(spent, "approval.used", now_s, call.caller)


def no_yes(found: Approval, alias: str) -> RpcError:
    """Return the error that tells the caller of `alias` that a request is not approved."""
    data: dict[str, object] = {"reason": "approval_denied", "approvalId": found.id}
    if found.state == "denied":
        return RpcError(DENIED, f"An administrator denied {alias}", data)
    data |= {
        "reason": "approval_required",
        "expiresAt": int(found.expires_at_s),
        "decider": found.call.decider,
    }
    return RpcError(APPROVAL_NEEDED, f"{alias} waits for a person's approval", data)


class ApprovalStore(Protocol):
    """Rows by org and id. Each write is one transaction with its audit event."""

    async def insert(
        self,
        org_id: str,
        new: ApprovalTransition,
        *,
        max_pending: int,
        arguments: bytes | None = None,
    ) -> Approval | None:
        """Add a request, and return it; or return the one that `waiting` finds: a call has one at a
        time. None: the org has `max_pending` already. `arguments`: stored for the decider."""

    async def get(self, org_id: str, approval_id: str) -> Approval | None: ...

    async def waiting(self, org_id: str, key: str, now_s: float) -> Approval | None:
        """Return the approval of a call (`ApprovedCall.key`) that has not expired: approved, else
        pending, else denied by an administrator, whose denial holds as long."""

    async def replace(self, org_id: str, before: Approval, after: ApprovalTransition) -> bool:
        """Write `after` if the row still is `before`, and return whether it was."""


class Approvals:
    """The queue of one process; everything it knows is in the store."""

    def __init__(
        self,
        store: ApprovalStore,
        *,
        now_s: Callable[[], float],
        new_id: Callable[[], str],
        new_nonce: Callable[[], str],
    ) -> None:
        self.store = store
        self.now_s = now_s
        self.new_id = new_id
        self.new_nonce = new_nonce

    async def ask(
        self,
        call: ApprovedCall,
        *,
        ttl_s: float,
        tool: str = "",
        arguments: Mapping[str, object] | None = None,
    ) -> Approval:
        """Return the waiting request for `call`, or a new one. `arguments`: for the decider; None:
        they are not stored. Raises: ApprovalRefused, if MAX_PENDING of the org wait."""
        now = self.now_s()
        waiting = await self.store.waiting(call.org_id, call.key(), now)
        if waiting is not None:
            return waiting
        new = requested(
            call,
            approval_id=self.new_id(),
            nonce=self.new_nonce(),
            now_s=now,
            ttl_s=ttl_s,
            tool=tool,
        )
        found = await self.store.insert(
            call.org_id, new, max_pending=MAX_PENDING, arguments=shown(arguments)
        )
        if found is None:
            raise ApprovalRefused(f"{MAX_PENDING} requests wait for approval already")
        return found

    async def look(self, org_id: str, approval_id: str) -> Approval | None:
        """Return a request as it stands now, whether or not its end is on record."""
        found = await self.store.get(org_id, approval_id)
        passed = None if found is None else expired(found, self.now_s())
        return found if passed is None else passed.approval

    async def decide(
        self, org_id: str, approval_id: str, *, approve: bool, by: str
    ) -> Approval | Refused:
        """Return the decided approval, or why it cannot be decided."""
        outcome = await self.move(
            org_id, approval_id, lambda one, now: decided(one, approve=approve, by=by, now_s=now)
        )
        return "expired" if late(outcome) else outcome

    async def use(
        self, approval_id: str, call: ApprovedCall, *, nonce: str, call_id: str
    ) -> Approval | Refused:
        """Return the used approval, which is of this call alone, or why there is none."""
        outcome = await self.move(
            call.org_id,
            approval_id,
            lambda one, now: used(one, call, nonce=nonce, call_id=call_id, now_s=now),
        )
        return "expired" if late(outcome) else outcome

    async def move(
        self, org_id: str, approval_id: str, step: Callable[[Approval, float], Outcome]
    ) -> Approval | Refused:
        for _ in range(MAX_ATTEMPTS):
            before = await self.store.get(org_id, approval_id)
            if before is None:
                return "unknown"
            outcome = step(before, self.now_s())
            if not isinstance(outcome, ApprovalTransition) or outcome.approval == before:
                return before if isinstance(outcome, ApprovalTransition) else outcome
            if await self.store.replace(org_id, before, outcome):
                return outcome.approval
        raise ApprovalRefused("the approval changes faster than it can be used")


def shown(arguments: Mapping[str, object] | None) -> bytes | None:
    if arguments is None:
        return None
    written = rpc.encode(dict(arguments))
    return written if len(written) <= MAX_SHOWN_BYTES else None


def late(outcome: Approval | Refused) -> bool:
    return isinstance(outcome, Approval) and outcome.state == "expired"
