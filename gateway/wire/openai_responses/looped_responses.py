"""A `Response` whose tools are called here: its lists of tools, its calls and what came of them,
whole or as the events of a stream.

A call of a server's tool is an item that is open until its result is there; what is said of others
meanwhile stands behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from billing.pricing.rating import RatedUsage
from gateway.generation_events import CallDelta, Item, MeteredUsage, TextDelta
from gateway.wire.openai_responses import events
from gateway.wire.openai_responses.answer import IncompleteDetails, IncompleteReason
from gateway.wire.openai_responses.from_responses import new_id
from gateway.wire.openai_responses.items import (
    PREFIXES,
    ItemStatus,
    McpApprovalRequest,
    McpCall,
    McpItem,
    McpListedTool,
    McpListTools,
)
from gateway.wire.openai_responses.mcp_history import call_id, round_of
from gateway.wire.openai_responses.to_responses import ResponseEncoder
from gateway.wire.openai_responses.tool_rounds import (
    ModelCall,
    OfferedTool,
    Round,
    ServerTools,
    told_apart,
)


class LoopedResponse(ResponseEncoder):
    """Encodes an answer of several rounds. `known`: labels of servers whose tools the conversation
    has listed already."""

    def __init__(self, *given: Any, known: frozenset[str] = frozenset(), **more: Any) -> None:
        super().__init__(*given, **more)
        self._known = known
        self._functions: frozenset[str] = frozenset()
        self._asks: frozenset[str] = frozenset()
        self._places: dict[str, int] = {}
        """The places of calls that have no result yet, by id."""
        self._writing_call: ModelCall | None = None
        self._calls: list[ModelCall] = []

    # ---- what the loop tells

    def listed(self, listing: ServerTools) -> bytes:
        if listing.server_label in self._known and listing.error is None:
            return b""
        item = McpListTools(
            id=new_id(PREFIXES[McpListTools]),
            server_label=listing.server_label,
            tools=tuple(to_listed(each) for each in listing.tools),
            error=listing.error,
        )
        self._begin_once()
        begun = msgspec.structs.replace(item, tools=(), error=None)
        self._send_added(begun)
        self._tell("response.mcp_list_tools.in_progress", item.id)
        ended = "completed" if listing.error is None else "failed"
        self._tell(f"response.mcp_list_tools.{ended}", item.id)
        self._send_done(item, len(self._done))
        self._done.append(item)
        return self._taken()

    def offered(self, own: frozenset[str], asks: frozenset[str]) -> None:
        self._functions, self._asks = own, asks

    def encode_round(self, items: Sequence[Item], round_: Round) -> bytes:
        self._calls = round_.calls
        return self.encode([each for each in items if isinstance(each, TextDelta)])

    def round_ended(self) -> bytes:
        self._close("incomplete" if self._finish_reason == "length" else "completed")
        self._num_calls = 0
        return self._taken()

    def called(self, call: McpCall) -> bytes:
        self._begin_once()
        place = self._places.pop(call.id, None)
        if place is None:  # one that was approved
            place = len(self._done)
            self._send_added(begun_as(call))
            self._tell("response.mcp_call.in_progress", call.id)
            self._done.append(call)
        self._done[place] = call
        ended = "completed" if call.error is None else "failed"
        self._tell(f"response.mcp_call.{ended}", call.id, place)
        self._send_done(call, place)
        return self._taken()

    def asked(self, request: McpApprovalRequest) -> bytes:
        self._ask(request)
        return self._taken()

    def _ask(self, request: McpApprovalRequest) -> None:
        self._send_added(request)
        self._send_done(request, len(self._done))
        self._done.append(request)

    def finish_loop(
        self, usage: MeteredUsage, cost: RatedUsage | None, why: IncompleteReason | None
    ) -> bytes:
        if why is not None:
            self._incomplete = IncompleteDetails(why)
        self._begin_once()
        self._give_up_calls()
        return self._taken() + self.finish(usage, cost)

    def fail(self, *, status: int, message: str) -> bytes:
        self._begin_once()
        self._close("incomplete")
        self._give_up_calls()
        return super().fail(status=status, message=message)

    def _give_up_calls(self) -> None:
        """Give up the calls that nobody waits for any more."""
        for place in self._places.values():
            call = self._done[place]
            assert isinstance(call, McpCall)
            given_up = self._done[place] = msgspec.structs.replace(call, status="incomplete")
            self._send_done(given_up, place)
        self._places.clear()

    # ---- calls of servers' tools

    def _call(self, call: CallDelta) -> None:
        made = self._calls[call.index]
        if call.name is not None:
            self._close("completed")
            self._num_calls = call.index
            if made.alias not in self._functions:
                self._begin_call(made)
        if self._writing_call is None:
            super()._call(call)
        elif call.arguments and made.alias not in self._asks and self._stream:
            name = "response.mcp_call_arguments.delta"
            about = self._about_call(made)
            self._send(events.ArgumentsDelta(type=name, **about, delta=call.arguments))

    def _begin_call(self, made: ModelCall) -> None:
        self._writing_call = made
        if made.alias not in self._asks:
            self._send_added(self._item(made, "in_progress"))
            self._tell("response.mcp_call.in_progress", made.id)

    def _close(self, status: ItemStatus) -> None:
        made, self._writing_call = self._writing_call, None
        if made is None:
            super()._close(status)
            return
        place = len(self._done)
        if made.alias in self._asks:
            label, name = told_apart(made.alias)
            request = McpApprovalRequest(
                id=call_id(PREFIXES[McpApprovalRequest], round_of(made.id)),
                server_label=label,
                name=name,
                arguments=made.text,
            )
            self._ask(request)
            return
        if self._stream:
            name = "response.mcp_call_arguments.done"
            about = self._about_call(made)
            self._send(events.ArgumentsDone(type=name, **about, arguments=made.text))
        if status == "completed":
            self._places[made.id] = place
        cut = "calling" if status == "completed" else "incomplete"
        self._done.append(self._item(made, cut))

    def _item(self, made: ModelCall, status: Any) -> McpCall:
        label, name = told_apart(made.alias)
        return McpCall(
            id=made.id,
            server_label=label,
            name=name,
            arguments="" if status == "in_progress" else made.text,
            status=status,
        )

    # ---- events

    def _begin_once(self) -> None:
        if self._sequence_number == 0:
            self._begin()

    def _about_call(self, made: ModelCall) -> dict[str, Any]:
        return {
            "sequence_number": self._next(),
            "item_id": made.id,
            "output_index": len(self._done),
        }

    def _tell(self, name: str, item_id: str, place: int | None = None) -> None:
        """Send an event that has nothing but its name. `place`: of the item; None: the next."""
        if self._stream:
            event = events.ItemPartEvent(
                type=name,
                sequence_number=self._next(),
                item_id=item_id,
                output_index=len(self._done) if place is None else place,
            )
            self._send(event)

    def _send_added(self, item: McpItem) -> None:
        if self._stream:
            self._send_item("response.output_item.added", item, len(self._done))

    def _send_done(self, item: McpItem, place: int) -> None:
        if self._stream:
            self._send_item("response.output_item.done", item, place)


class ResponseSteps:
    """A `LoopedResponse`, as a loop tells it."""

    def __init__(self, encoder: LoopedResponse) -> None:
        self._encoder = encoder
        self.listed, self.offered = encoder.listed, encoder.offered
        self.encode, self.round_ended = encoder.encode_round, encoder.round_ended
        self.called, self.asked = encoder.called, encoder.asked
        self.finish = encoder.finish_loop


def begun_as(call: McpCall) -> McpCall:
    return msgspec.structs.replace(call, status="in_progress", output=None, error=None)


def to_listed(tool: OfferedTool) -> McpListedTool:
    return McpListedTool(
        name=tool.name,
        description=tool.description,
        input_schema=tool.input_schema,
        annotations=tool.annotations or None,
    )
