"""What MCP servers want a model to write, written by the model that the configuration names.

Above: `mcp_door`. Below: `own_models`. It is a generation of whoever called the server, as any
other: admitted by their limits, their caps and the models that their key may use, and on their
bill. Nothing of it is kept but what the audit log says of all calls: no text.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Mapping
from typing import Any

import msgspec
from mcp_types import CreateMessageRequestParams, SamplingMessage, TextContent
from pydantic import ValidationError

from gateway.calls import REQUEST_PREFIX, Surface
from gateway.errors import to_face
from gateway.ids import uuid7_hex
from gateway.inference import RateLimited
from gateway.mcp.metered import refused
from gateway.mcp.own_models import OwnModels
from gateway.mcp.records import AuditRecords, SampleOutcome
from gateway.settings_file import WrittenMcpSampling
from gateway.wire.answer import ChatCompletion
from gateway.wire.from_openai import from_openai
from gateway.wire.to_openai import to_openai
from mcp_bridge.caller import Caller
from mcp_bridge.protocol.rpc import INTERNAL_ERROR, INVALID_PARAMS, RpcError

SURFACE = Surface(id_prefix="chatcmpl-", read=from_openai, encoder=to_openai)
DEADLINE_S = 300.0
MAX_PROMPT_BYTES = 1024 * 1024
STOP_REASONS = {"stop": "endTurn", "length": "maxTokens"}
NOT_SERVED = ("tools", "toolChoice", "task")
"""Of what a server may ask, what it is not told that it can: refused by name."""


class ModelSampler:
    """A Sampler of the bridge. `models`: by server."""

    def __init__(
        self,
        own: OwnModels,
        records: AuditRecords,
        models: Mapping[str, WrittenMcpSampling],
    ) -> None:
        self._own, self._records, self._models = own, records, models

    async def sample(self, caller: Caller, server: str, params: dict[str, Any]) -> dict[str, Any]:
        """The result of a `sampling/createMessage`. Raises: RpcError, with why in its data."""
        written = self._models[server]
        assert written.model is not None
        request_id = REQUEST_PREFIX + uuid7_hex()
        outcome: SampleOutcome = "failed"
        try:
            body = to_chat(written, params)
            answer = await self._generate(caller, written.model, request_id, body)
            outcome = "done"
        except RpcError:
            raise
        except CancelledError:
            outcome = "left"
            raise
        except RateLimited as error:
            outcome = "refused"
            raise refused(error.refusal) from None
        except Exception as error:
            found = to_face(error).body
            data = {"reason": found.code or found.type}
            raise RpcError(INTERNAL_ERROR, found.message, data) from None
        finally:
            await self._records.sampled(caller, server, written.model, request_id, outcome)
        return to_result(answer)

    async def _generate(
        self, caller: Caller, model: str, request_id: str, body: bytes
    ) -> ChatCompletion:
        """Raises: RpcError, what generations raise."""
        written = await self._own.ask(
            caller, SURFACE, model, request_id, body, deadline_s=DEADLINE_S
        )
        if written is None:
            raise RpcError(INTERNAL_ERROR, "The model's answer was given up", {"reason": "left"})
        return msgspec.json.decode(written, type=ChatCompletion)


def to_chat(written: WrittenMcpSampling, params: dict[str, Any]) -> bytes:
    """The same as a chat completion, within what the operator allows. Raises: RpcError."""
    try:
        asked = CreateMessageRequestParams.model_validate(params)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise bad(".".join(str(part) for part in first["loc"]), first["msg"]) from None
    for name in NOT_SERVED:
        if params.get(name) is not None:
            raise bad(name, "is not served by this gateway's own models")
    if asked.include_context not in (None, "none"):
        raise bad("includeContext", "has to be 'none'")
    if asked.max_tokens < 1:
        raise bad("maxTokens", "has to be 1 or more")
    messages = [
        {"role": message.role, "content": text_of(message, index)}
        for index, message in enumerate(asked.messages)
    ]
    if asked.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": asked.system_prompt})
    chat: dict[str, Any] = {
        "model": written.model,
        "messages": messages,
        "max_tokens": min(asked.max_tokens, written.max_tokens),
    }
    if asked.temperature is not None:
        chat["temperature"] = asked.temperature
    if asked.stop_sequences:
        chat["stop"] = asked.stop_sequences
    body = msgspec.json.encode(chat)
    if len(body) > MAX_PROMPT_BYTES:
        raise bad("messages", f"more than {MAX_PROMPT_BYTES} bytes")
    return body


def text_of(message: SamplingMessage, index: int) -> str:
    """Raises: RpcError."""
    content = message.content
    parts = content if isinstance(content, list) else [content]
    texts = [part.text for part in parts if isinstance(part, TextContent)]
    if len(texts) != len(parts):
        raise bad(f"messages.{index}.content", "has to be text")
    return "\n".join(texts)


def to_result(answer: ChatCompletion) -> dict[str, Any]:
    choice = answer.choices[0]
    reason = str(choice.finish_reason)
    return {
        "role": "assistant",
        "content": {"type": "text", "text": choice.message.content or ""},
        "model": answer.model,
        "stopReason": STOP_REASONS.get(reason, reason),
    }


def bad(field: str, why: str) -> RpcError:
    return RpcError(INVALID_PARAMS, f"Invalid params: {field}: {why}", {"field": field})
