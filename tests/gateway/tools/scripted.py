"""A worker whose model calls tools by a script, and whose servers are functions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.fake.engine import FakeCore
from engine.protocol import EngineRequest
from engine.text.tokenizer import Tokenizer
from gateway.principal import Principal
from gateway.tools.toolbox import (
    ApprovalState,
    CallOutcome,
    ListFailed,
    NeedsApproval,
    RefusedCall,
    ToolResult,
)
from gateway.wire.openai_responses.tool_rounds import OfferedTool

PENNY = Path(__file__).resolve().parents[3] / "models" / "penny"
TOKENIZER = Tokenizer.load(PENNY)
CONFIG = EngineConfig(model=Path("fake"), max_model_len=16_384, num_blocks=8192)
CALLS, END = "CALL:", ":DONE"
"""Marks around the calls that a user's message makes the model write, in JSON: a list of rounds,
each a list of [alias, arguments]. After the last round it answers."""
ENDLESS = "Write without an end."


def script(*rounds: list[tuple[str, Any]], said: str = "Look at it.") -> str:
    return f"{said} {CALLS}{json.dumps(rounds)}{END}"


def call_text(alias: str, arguments: Any) -> str:
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": "{alias}", "arguments": {written}}}\n</tool_call>'


SEEN: list[tuple[list[int], list[int]]] = []
"""Prompts and what was answered to them, in order."""


REQUESTS: list[EngineRequest] = []
"""As the engine was asked, in order."""


def respond(request: EngineRequest, index: int) -> Iterator[int]:
    REQUESTS.append(request)
    text = TOKENIZER.decode(request.prompt_token_ids, skip_special_tokens=False)
    _, found, rest = text.rpartition(CALLS)
    rounds = json.loads(rest.partition(END)[0]) if found else []
    done = rest.count("<|im_start|>assistant\n") - 1
    if done < len(rounds):
        calls = [call_text(alias, arguments) for alias, arguments in rounds[done]]
        said = "\n".join(calls)
    elif ENDLESS in text:
        return cycle(TOKENIZER.encode("on and "))
    else:
        said = f"Done after {done} rounds."
    answer = TOKENIZER.encode(said)
    SEEN.append((list(request.prompt_token_ids), list(answer)))
    return iter(answer)


class ScriptedCore(FakeCore):
    """It says what it is scripted to, whatever it is kept to, of which `REQUESTS` tell."""

    def prepare(self, request: EngineRequest) -> None: ...


def core() -> FakeCore:
    return ScriptedCore(CONFIG, vocab_size=TOKENIZER.vocab_size, respond=respond)


ASKED = "mcpapp_0"
"""The id of the approval that each call of `ask` needs from an administrator."""
READS, WRITES = {"readOnlyHint": True}, {"readOnlyHint": False}
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}}


def tool(name: str, annotations: dict[str, Any], server: str = "maps") -> OfferedTool:
    return OfferedTool(
        server_label=server,
        name=name,
        description=f"To {name}.",
        input_schema=SCHEMA,
        annotations=annotations,
    )


Act = Callable[[dict[str, Any]], Awaitable[CallOutcome]]


class FakeToolbox:
    """A toolbox of functions that remembers what was called."""

    def __init__(
        self, servers: Mapping[str, Sequence[tuple[OfferedTool, Act]] | ListFailed]
    ) -> None:
        self._servers = servers
        self.called: list[tuple[str, dict[str, Any]]] = []
        self.cancelled: list[str] = []
        self.spent: set[tuple[str, str]] = set()
        self.approvals: dict[str, ApprovalState] = {}
        """The state of each approval that tools asked for; a test that changes one stands for the
        rules."""

    def labels(self, **_: str | None) -> tuple[str, ...]:
        return tuple(self._servers)

    def knows(self, principal: Principal, server_label: str) -> bool:
        return server_label in self._servers

    async def offered(self, principal: Principal, server_label: str) -> tuple[OfferedTool, ...]:
        found = self._servers[server_label]
        if isinstance(found, ListFailed):
            raise found
        return tuple(tool for tool, _ in found)

    async def call(
        self,
        principal: Principal,
        tool: OfferedTool,
        arguments: dict[str, Any],
        timeout_s: float,
        *,
        part_of: str | None = None,
    ) -> CallOutcome:
        found = self._servers[tool.server_label]
        assert not isinstance(found, ListFailed)
        act = next(act for each, act in found if each.name == tool.name)
        self.called.append((tool.alias, arguments))
        try:
            return await act(arguments)
        except BaseException:
            self.cancelled.append(tool.alias)
            raise

    async def approval(self, principal: Principal, approval_id: str) -> ApprovalState:
        return self.approvals.get(approval_id, "unknown")

    async def decide(self, principal: Principal, approval_id: str, approve: bool) -> ApprovalState:
        if self.approvals.get(approval_id) == "pending_caller":
            self.approvals[approval_id] = "approved" if approve else "denied"
        return await self.approval(principal, approval_id)

    async def spend(self, principal: Principal, request_id: str) -> bool:
        is_new = (principal.org_id, request_id) not in self.spent
        self.spent.add((principal.org_id, request_id))
        return is_new


class Servers:
    """`held` waits until `gate` is opened; `running` says how many were under way at once."""

    def __init__(self) -> None:
        self.running = self.most_running = 0
        self.order: list[str] = []
        self.gate: asyncio.Event | None = None
        self.toolbox = FakeToolbox(
            {
                "maps": [
                    (tool("look", READS), self.look),
                    (tool("peek", READS), self.look),
                    (tool("write", WRITES), self.write),
                    (tool("fail", READS), self.fail),
                    (tool("refuse", READS), self.refuse),
                    (tool("ask", READS), self.ask),
                    (tool("hold", READS), self.hold),
                    (tool("flood", READS), self.flood),
                ],
                "away": ListFailed("The server does not say which tools it has."),
            }
        )

    async def look(self, arguments: dict[str, Any]) -> ToolResult:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        for _ in range(5):
            await asyncio.sleep(0)
        self.running -= 1
        self.order.append(f"look {arguments.get('place')}")
        return ToolResult(text=f"{arguments.get('place')} is fine")

    async def write(self, arguments: dict[str, Any]) -> ToolResult:
        found = await self.look(arguments)
        self.order[-1] = f"write {arguments.get('place')}"
        return found

    async def fail(self, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(text="no such place", is_error=True)

    async def refuse(self, arguments: dict[str, Any]) -> RefusedCall:
        return RefusedCall(message="not today", code=-32000)

    async def ask(self, arguments: dict[str, Any]) -> NeedsApproval:
        return NeedsApproval(message="A person has to approve this call.", id=ASKED)

    async def hold(self, arguments: dict[str, Any]) -> ToolResult:
        self.gate = self.gate or asyncio.Event()
        await self.gate.wait()
        return ToolResult(text="at last")

    async def flood(self, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(text="w" * 1_000_000)


def mcp(label: str = "maps", approval: Any = "never", **more: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": label, "require_approval": approval, **more}


class OneUsage(msgspec.Struct):
    """A row of usage_events, as far as loops are asked."""

    uncached: int
    cached: int
    output: int
