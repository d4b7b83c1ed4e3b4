"""A round of the server-side tool loop: the tools on offer, the model's text and its calls.

Filled by `gateway.tools`, shown by `looped_chat` and `looped_responses`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from billing.pricing.rating import RatedUsage
from gateway.generation_events import FinishReason, MeteredUsage, TextDelta
from gateway.ids import uuid7_hex
from gateway.wire.openai_responses.items import (
    PREFIXES,
    McpCall,
)
from gateway.wire.openai_responses.mcp_history import ROUND_CHARS, call_id


class OfferedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of an MCP server, as the server lists it."""

    server_label: str
    name: str
    description: str | None = None
    input_schema: dict[str, Any] = {}
    annotations: dict[str, Any] = {}

    @property
    def alias(self) -> str:
        """Return the name that the model knows."""
        return f"{self.server_label}__{self.name}"

    @property
    def may_run_beside_others(self) -> bool:
        """Return whether it says that it changes nothing, or nothing more when called again."""
        return any(
            self.annotations.get(hint) is True for hint in ("readOnlyHint", "idempotentHint")
        )


class ServerTools(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a server that the model may call. `error`: why it may call none."""

    server_label: str
    tools: tuple[OfferedTool, ...] = ()
    error: str | None = None


class ModelCall:
    """A call of the model, as it is written."""

    def __init__(self, alias: str, position: int, round_: str, text: str = "") -> None:
        self.id = call_id(PREFIXES[McpCall], round_)
        self.alias, self.position = alias, position
        self.pieces = [text] if text else []

    @property
    def text(self) -> str:
        """Return its arguments."""
        return "".join(self.pieces)


class Round:
    """One answer of the model in the loop: its text, its reasoning and the calls it makes."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[ModelCall] = []
        self._name = uuid7_hex()[-ROUND_CHARS:]
        self.finish_reason: FinishReason | None = None
        self.usage = MeteredUsage()
        self.cost: RatedUsage | None = None

    def add(self, delta: TextDelta) -> None:
        self._texts.append(delta.text)
        self._reasoning.append(delta.reasoning)
        for call in delta.calls:
            if call.name is not None:
                self.calls.append(ModelCall(call.name, len(self.calls), self._name))
            self.calls[call.index].pieces.append(call.arguments)
        self.finish_reason = delta.finish_reason or self.finish_reason

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def num_call_chars(self) -> int:
        return sum(len(call.alias) + len(call.text) for call in self.calls)


class CallsOfRound(msgspec.Struct, frozen=True):
    """The calls of a round. `here`: of tools of servers, those that ask for approval among them,
    and of names that nobody has; `elsewhere`: of functions that the client declared (`own`)."""

    here: list[ModelCall]
    asking: list[ModelCall]
    elsewhere: list[ModelCall]

    @classmethod
    def of(cls, round_: Round, own: frozenset[str], asks: frozenset[str]) -> CallsOfRound:
        return cls(
            here=[each for each in round_.calls if each.alias not in own],
            asking=[each for each in round_.calls if each.alias in asks],
            elsewhere=[each for each in round_.calls if each.alias in own],
        )


def told_apart(alias: str) -> tuple[str, str]:
    """Split an alias into server and tool. What a model makes up may name no server."""
    label, found, name = alias.partition("__")
    return (label, name) if found else ("", alias)
