"""Embeds what tools mean, with an embedding model that the settings name.

A search is a request of whoever searches, like any other: admitted by their limits, caps and
permitted models, and on their bill. A worker embeds a catalogue once, at the first search. What
the scan of offers embeds is the gateway's own use."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from prometheus_client import Counter

from gateway.http_errors.table import to_http_error
from gateway.ids import uuid7_hex
from gateway.inference.calls import REQUEST_PREFIX
from gateway.inference.generate import RateLimited
from gateway.inference.house_embedding import HouseEmbedding, Vectors
from gateway.mcp.models.own_models import OwnModels
from gateway.wire.surfaces import EMBEDDINGS
from mcp_bridge.caller import Caller
from mcp_bridge.protocol.rpc import RpcError
from mcp_bridge.routing.search import NotEmbedded

DEADLINE_S = 60.0
TEXTS_AT_ONCE = 64


class ModelEmbedder:
    """An Embedder of the bridge, by a model of ours."""

    def __init__(self, own: OwnModels, model: str) -> None:
        self._own, self._model = own, model

    async def embed(self, caller: Caller, texts: Sequence[str]) -> list[list[float]]:
        """Raises: NotEmbedded."""
        found: list[list[float]] = []
        for first in range(0, len(texts), TEXTS_AT_ONCE):
            try:
                found += await self._embed(caller, texts[first : first + TEXTS_AT_ONCE])
            except RpcError as error:
                raise NotEmbedded(error.message) from None
            except RateLimited as error:
                raise NotEmbedded(str(error)) from None
            except Exception as error:
                http_error = to_http_error(error)
                raise NotEmbedded(http_error.body.code or http_error.body.type) from error
        return found

    async def _embed(self, caller: Caller, texts: Sequence[str]) -> list[list[float]]:
        """Raises: RpcError, what requests raise."""
        body = msgspec.json.encode({"model": self._model, "input": texts})
        request_id = REQUEST_PREFIX + uuid7_hex()
        written = await self._own.ask(
            caller, EMBEDDINGS, self._model, request_id, body, deadline_s=DEADLINE_S
        )
        if written is None:
            raise NotEmbedded("the answer was given up")
        answer = msgspec.json.decode(written, type=Vectors)
        return [each.embedding for each in sorted(answer.data, key=lambda each: each.index)]


class ScanEmbedder:
    """A SentenceEmbedding of the bridge, by a model of ours, at the house's expense. `texts`:
    counts them by outcome."""

    def __init__(self, own: HouseEmbedding, texts: Counter) -> None:
        self._own, self._texts = own, texts

    async def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Raises: NotEmbedded."""
        try:
            found = await self._own.embed(texts)
        except Exception as error:
            self._texts.labels("failed").inc(len(texts))
            http_error = to_http_error(error)
            raise NotEmbedded(http_error.body.code or http_error.body.type) from error
        self._texts.labels("embedded").inc(len(texts))
        return found
