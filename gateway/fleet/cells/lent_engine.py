"""Bounds what an engine of another cell counts by what its request can use."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Literal

import msgspec

from engine.protocol import EngineOutput, EngineRequest, Usage
from engine.transport.client import EngineClient

log = logging.getLogger(__name__)

Take = Callable[[EngineOutput], Literal["left", "taken", "enough"]]
"""The callback of `Engine.generate`, which takes an output at once."""


class LentEngineClient(EngineClient):
    """The client of an engine that another cell lends."""

    async def generate(
        self, request: EngineRequest, take: Take | None = None, *, at_once: bool = False
    ) -> AsyncGenerator[EngineOutput, None]:
        most = most_of(request)
        within = None if take is None else taking_believed(take, most)
        outputs = super().generate(request, within, at_once=at_once)
        async with aclosing(outputs):
            async for output in outputs:
                yield believed(output, most)


def taking_believed(take: Take, most: Usage) -> Take:
    return lambda output: take(believed(output, most))


def most_of(request: EngineRequest) -> Usage:
    """Return the most that a request can use."""
    num_choices = request.n * len(request.prompts)
    return Usage(
        prompt_tokens=sum(map(len, request.prompts)),
        generated_tokens=num_choices * request.sampling.max_tokens,
        resumed_tokens=sum(map(len, request.said)),
    )


def believed(output: EngineOutput, most: Usage) -> EngineOutput:
    """Return an output whose usage is no more than `most`."""
    used = output.usage
    if (
        used.prompt_tokens <= most.prompt_tokens
        and used.generated_tokens <= most.generated_tokens
        and used.resumed_tokens <= most.resumed_tokens
        and used.cached_tokens <= used.prompt_tokens
    ):
        return output
    log.error("%s: another cell's engine counts %s of at most %s", output.request_id, used, most)
    prompt_tokens = min(used.prompt_tokens, most.prompt_tokens)
    usage = msgspec.structs.replace(
        used,
        prompt_tokens=prompt_tokens,
        cached_tokens=min(used.cached_tokens, prompt_tokens),
        generated_tokens=min(used.generated_tokens, most.generated_tokens),
        resumed_tokens=min(used.resumed_tokens, most.resumed_tokens),
    )
    return msgspec.structs.replace(output, usage=usage)
