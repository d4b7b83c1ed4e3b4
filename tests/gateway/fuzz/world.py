"""A running worker in front of an engine without a model, who asks it, and its books."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import redis
import sqlalchemy as sa

from billing.tables import usage_events
from engine.fake.engine import FakeCore, drawn
from engine.protocol import EngineRequest
from engine.text.tokenizer import Tokenizer
from tests.gateway.fuzz.asking import SEED_OF_A_CALL, Asker
from tests.gateway.routes.openapi.running import ROOT, TIMEOUT_S, VOCAB_SIZE, Running

TOKENIZER = Tokenizer.load(ROOT / "models" / "penny")
SAYS = (
    "I have seen it all.",
    "",
    "ü 😀 and\nmore, e\u0301",
    'One.\n<tool_call>\n{"name": "f", "arguments": {"a": [1, "ü"]}}\n</tool_call>',
    '<tool_call>{"arguments": {}, "name": "g"}</tool_call><tool_call>{"name": "f"',
    "<think>Hm, hm.</think>So be it.",
    "</tool_call> <tool_call> } data: [DONE]\n\n",
)
A_CALL = 3
IDS = [TOKENIZER.encode(text) for text in SAYS]
MANY = 8
"""Choices, of which none goes on for ever."""


def respond(request: EngineRequest, index: int) -> Iterator[int]:
    """One of `SAYS`, or what no text is, as prompt, seed and choice have it."""
    root = repr((request.prompt_token_ids, request.sampling.seed, index)).encode()
    choice = hashlib.blake2b(root, digest_size=1).digest()[0] % (len(IDS) + 2)
    if request.sampling.seed == SEED_OF_A_CALL:
        choice = A_CALL
    if choice < len(IDS):
        return iter(IDS[choice])
    noise = drawn(request, index, vocab_size=VOCAB_SIZE)
    return noise if choice == len(IDS) and request.n < MANY else islice(noise, 12)


class World:
    def __init__(self, worker: Running, core: FakeCore, redis_url: str) -> None:
        self.worker, self.core, self.redis_url = worker, core, redis_url
        self.asker = Asker(worker.url, worker.everything, calls={"seed": SEED_OF_A_CALL})

    async def settled(self) -> list[Any]:
        """Once nothing runs any more: what is on the bill."""
        services = self.worker.services
        deadline = time.monotonic() + TIMEOUT_S
        while services.generation.open_calls or services.spool._open:
            assert time.monotonic() < deadline, services.spool._open
            await asyncio.sleep(0.01)
        assert await services.shipper.drain(TIMEOUT_S)
        async with services.system_db.connect() as conn:
            return list(await conn.execute(sa.select(usage_events)))

    def num_reserved(self) -> int:
        with redis.from_url(self.redis_url) as store:
            return sum(store.zcard(key) for key in store.scan_iter("tollgate:{*}:leases"))

    def check_books(self) -> None:
        rows = self.worker.run(self.settled())
        deadline = time.monotonic() + TIMEOUT_S
        while self.num_reserved():
            assert time.monotonic() < deadline, "something is still reserved"
            time.sleep(0.01)
        status = self.core.status()
        assert status.num_running == status.num_waiting == 0
        self.asker.check_bill(rows, status.generated_tokens)
