"""Makes of `POST /v1/responses/compact` a `GenerationCall`: the model sums a conversation up, for
itself to go on with. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from billing.pricing.rating import RatedUsage
from gateway.generate_request import AnswerHeader, GenerateRequest
from gateway.generation_events import Item as GeneratedItem
from gateway.generation_events import MeteredUsage, TextDelta
from gateway.inference.calls import GenerationCall, RequestContext, read_context, to_call
from gateway.inference.services import GenerationServices
from gateway.responses.creation import ID_PREFIX, check_may_keep, earlier_items
from gateway.responses.kept import ResponseOwner
from gateway.responses.wiring import Responses
from gateway.wire.openai_responses.answer import to_usage
from gateway.wire.openai_responses.compaction import (
    CompactedResponse,
    CompactRequest,
    to_response_request,
)
from gateway.wire.openai_responses.from_responses import new_id, own_items, read_items, to_generate
from gateway.wire.openai_responses.items import PREFIXES, CompactionItem, Item, Message
from gateway.wire.surfaces import AnswerFormat

ASKED = (
    "Sum up this conversation for yourself: you will go on from your summary and my messages alone."
    " Say what I want, what was decided and why, what was done and to which files, what came of it,"
    " and what is left to do. Keep names, paths, numbers and errors to the letter. Call no tool."
)
"""The last message that the model reads."""


async def compact(
    services: GenerationServices, responses: Responses, context: RequestContext
) -> GenerationCall:
    """Raises: BadField, NotFound."""
    owner = ResponseOwner.of(context.principal)
    context, asked = await read_context(context, read_compact)
    request = to_response_request(asked)
    check_may_keep(context.principal, request)
    request.input = responses.seal.unseal_items(owner, request.input)
    before = await earlier_items(responses, owner, request)
    items = (*before, *own_items(request, {item.id: item for item in before}))
    generate = asking(to_generate(request, items))
    said = tuple(item for item in items if isinstance(item, Message) and item.role == "user")
    seal = partial(responses.seal.seal, owner, "compaction")
    encoder = partial(CompactionEncoder.of, said, seal)
    return to_call(services, AnswerFormat(id_prefix=ID_PREFIX, encoder=encoder), context, generate)


def read_compact(body: bytes) -> CompactRequest:
    """Raises BadField."""
    return read_items(body, "input", CompactRequest)


def asking(request: GenerateRequest) -> GenerateRequest:
    """Ask for a summary of what a request holds."""
    prompt = request.prompt
    assert prompt is not None
    messages = [*prompt.messages, {"role": "user", "content": ASKED}]
    paths = (*prompt.message_paths, "input")
    prompt = msgspec.structs.replace(prompt, messages=messages, message_paths=paths)
    return msgspec.structs.replace(request, prompt=prompt)


class CompactionEncoder:
    """Encodes a summary: what the user said, and the summary sealed. `said`: what the user said;
    `seal`: seals a summary."""

    def __init__(
        self, said: Sequence[Item], seal: Callable[[str], str], heading: AnswerHeader
    ) -> None:
        self._said, self._seal, self._heading = said, seal, heading
        self._texts: list[str] = []

    @classmethod
    def of(
        cls,
        said: Sequence[Item],
        seal: Callable[[str], str],
        request: GenerateRequest,
        heading: AnswerHeader,
    ) -> CompactionEncoder:
        """Make one as an `AnswerFormat` does."""
        return cls(said, seal, heading)

    def encode(self, items: Sequence[GeneratedItem]) -> bytes:
        self._texts += [item.text for item in items if isinstance(item, TextDelta)]
        return b""

    def finish(self, usage: MeteredUsage, cost: RatedUsage | None = None) -> bytes:
        sealed = self._seal("".join(self._texts).strip())
        summary = CompactionItem(id=new_id(PREFIXES[CompactionItem]), encrypted_content=sealed)
        answer = CompactedResponse(
            id=self._heading.id,
            created_at=self._heading.created,
            output=(*self._said, summary),
            usage=to_usage(usage, cost),
        )
        return msgspec.json.encode(answer)
