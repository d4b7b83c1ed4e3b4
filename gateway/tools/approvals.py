"""Reads what a person says of calls in a tool loop: those that the client itself wanted to confirm
(`require_approval`), and those of the organization's rules, which stand in the queue of approvals.
The id of a request by the rules begins with the approval's own, by which an administrator finds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import msgspec

from gateway.principal import Principal
from gateway.tenancy.errors import Conflict
from gateway.tools.toolbox import ApprovalState, NeedsApproval, RefusedCall, Toolbox
from gateway.wire.openai_responses.items import McpApprovalRequest
from gateway.wire.openai_responses.mcp_history import ROUND_CHARS, round_of
from gateway.wire.openai_responses.tool_rounds import ModelCall

QUEUED = "mcpapp_"
"""How ids of the queue begin; those of requests that the client wanted begin otherwise."""


class ApprovalPending(Conflict):
    """A request continues a call that an administrator has not answered."""

    code: ClassVar[str] = "approval_pending"
    constant = "the call waits for an administrator's answer"


class AnsweredRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for approval with what the client says of it."""

    id: str
    made: ModelCall
    approve: bool

    @property
    def approval_id(self) -> str | None:
        """Return its id in the queue; None: the client alone wanted to be asked."""
        return self.id[:-ROUND_CHARS] if self.id.startswith(QUEUED) else None


def request_id(made: ModelCall, asks: NeedsApproval) -> str:
    return asks.id + round_of(made.id)


def to_request(made: ModelCall, id_: str) -> McpApprovalRequest:
    label, _, name = made.alias.partition("__")
    return McpApprovalRequest(id=id_, server_label=label, name=name, arguments=made.text)


async def settled(
    toolbox: Toolbox, principal: Principal, answers: Iterable[AnsweredRequest]
) -> dict[str, ApprovalState]:
    """Return the state of each request in the queue by id, after recording the caller's own
    answers, which are given only if nobody else's is missing. Raises: ApprovalPending."""
    found: dict[str, ApprovalState] = {}
    own: list[tuple[AnsweredRequest, str]] = []
    for answer in answers:
        if answer.approval_id is None:
            continue
        state = found[answer.id] = await toolbox.approval(principal, answer.approval_id)
        if state == "pending" and answer.approve:
            raise ApprovalPending(
                "input", f"the call waits for an administrator's answer ({answer.approval_id})"
            )
        if state == "pending_caller":
            own.append((answer, answer.approval_id))
    for answer, approval_id in own:
        found[answer.id] = await toolbox.decide(principal, approval_id, answer.approve)
    return found


async def refusal(
    toolbox: Toolbox, principal: Principal, answer: AnsweredRequest, state: ApprovalState | None
) -> RefusedCall | None:
    """Return why a call that the client approved is not made. `state`: of one in the queue, which
    is used up here."""
    if state is None:
        # Of a conversation that has branched, on one of them alone.
        is_new = await toolbox.spend(principal, answer.id)
    elif state == "denied":
        return RefusedCall(message="It was not approved.")
    else:
        is_new = state != "used"
    return (
        None if is_new else RefusedCall(message="Its approval was used already: ask for another.")
    )
