"""Lets a model that the settings name write what MCP servers sample. It is a generation of whoever
called the server, like any other: admitted by their limits, caps and permitted models, and on their
bill. Nothing of it is kept but what the audit log says of all calls: no text. A tool that the model
calls is the server's, which asks again with the result: nothing is called here."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.http_errors.table import to_http_error
from gateway.ids import uuid7_hex
from gateway.inference.calls import REQUEST_PREFIX
from gateway.inference.generate import RateLimited
from gateway.mcp.metered import refused
from gateway.mcp.models.own_models import OwnModels
from gateway.mcp.models.sampling_turns import refused_field, to_chat, to_result
from gateway.mcp.records import AuditRecords, SampleOutcome
from gateway.request_errors import BadField, ContextTooLong, UnknownModel
from gateway.settings.file import WrittenMcpSampling
from gateway.wire.openai.chat_answer import ChatCompletion
from gateway.wire.surfaces import CHAT
from mcp_bridge.caller import Caller
from mcp_bridge.protocol.rpc import INTERNAL_ERROR, RpcError

DEADLINE_S = 300.0


class ModelSampler:
    """A Sampler of the bridge, by models of ours. `models`: by server."""

    def __init__(
        self,
        own: OwnModels,
        records: AuditRecords,
        models: Mapping[str, WrittenMcpSampling],
    ) -> None:
        self._own, self._records, self._models = own, records, models

    async def sample(self, caller: Caller, server: str, params: dict[str, Any]) -> dict[str, Any]:
        """Return the result of a `sampling/createMessage`. Raises: RpcError, with why in its
        data."""
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
            if isinstance(error, BadField) and not isinstance(error, ContextTooLong | UnknownModel):
                raise refused_field(error) from None
            found = to_http_error(error).body
            data = {"reason": found.code or found.type}
            raise RpcError(INTERNAL_ERROR, found.message, data) from None
        finally:
            await self._records.sampled(caller, server, written.model, request_id, outcome)
        return to_result(answer, params)

    async def _generate(
        self, caller: Caller, model: str, request_id: str, body: bytes
    ) -> ChatCompletion:
        """Raises: RpcError, what generations raise."""
        written = await self._own.ask(caller, CHAT, model, request_id, body, deadline_s=DEADLINE_S)
        if written is None:
            raise RpcError(INTERNAL_ERROR, "The model's answer was given up", {"reason": "left"})
        return msgspec.json.decode(written, type=ChatCompletion)
