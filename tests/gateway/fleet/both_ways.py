"""One conversation before penny's own template and tokenizer and an engine without a model, asked
both ways: what its answers are in bytes, and that all its tokens count."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from billing.cache_contracts import DEFAULT_CONTRACT, ContractName
from engine.fake.engine import FakeCore, FakeEngine
from engine.protocol import EngineRequest
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from gateway.fleet.engine.replica import EngineReplica
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.generate_request import AnswerHeader, GenerateRequest
from gateway.generation_events import MeteredUsage
from gateway.request_errors import BadField
from gateway.wire.surfaces import ApiSurface

PENNY = Path(__file__).resolve().parents[3] / "models" / "penny"
TOKENIZER, TEMPLATE = Tokenizer.load(PENNY), ChatTemplate.load(PENNY)


class BothWays(msgspec.Struct, frozen=True, kw_only=True):
    whole: bytes
    streamed: bytes
    replica: EngineReplica
    usage: MeteredUsage


async def asked_both_ways(
    surface: ApiSurface,
    threads: PrepareThreads,
    fields: dict[str, Any],
    answer: str,
    *,
    contract: ContractName = DEFAULT_CONTRACT,
    of_stream: Mapping[str, Any] = MappingProxyType({}),
) -> BothWays | None:
    """`of_stream`: fields that go with a stream alone. None: it is refused, by the name of one of
    its fields."""
    ids = TOKENIZER.encode(answer)

    def respond(request: EngineRequest, index: int) -> Iterator[int]:
        return iter(ids)

    answers: list[bytes] = []
    used: list[MeteredUsage] = []
    for stream in (True, False):
        core = FakeCore(vocab_size=TOKENIZER.vocab_size, respond=respond)
        replica = EngineReplica(
            name="penny",
            client=FakeEngine(core),
            tokenizer=TOKENIZER,
            template=TEMPLATE,
            threads=threads,
            cache_contract=contract,
        )
        asked = {"model": "penny", "stream": stream, **fields, **(of_stream if stream else {})}
        body = json.dumps(asked).encode()
        try:
            said, usage = await answered(surface, replica, surface.read(body, "engine"))
        except BadField as error:
            assert (error.param or "").split("[")[0].split(".")[0] in fields
            return None
        answers.append(said)
        used.append(usage)
        assert usage.output + usage.wasted_output == core.status().generated_tokens
    assert used[0] == used[1]
    return BothWays(streamed=answers[0], whole=answers[1], replica=replica, usage=used[0])


async def answered(
    surface: ApiSurface, replica: EngineReplica, request: GenerateRequest
) -> tuple[bytes, MeteredUsage]:
    """Raises: BadField."""
    heading = AnswerHeader(id=surface.id_prefix + "1", created=1)
    encoder = surface.encoder(request, heading)
    opening = surface.opening and surface.opening(request, heading)
    prepared = await replica.prepare(request)
    body = b""
    async with aclosing(replica.stream(prepared, attempt_id="a", cache_salt="")) as stream:
        async for event in stream:
            assert event.usage is not None
            if opening is not None:
                body, opening = opening(event.usage), None
            body += encoder.encode(event.items)
    assert event.finished and event.usage is not None
    return body + encoder.finish(event.usage), event.usage
