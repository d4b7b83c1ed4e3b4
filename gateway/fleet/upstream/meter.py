"""Reads what an upstream says for what it costs: its usage where it gives one, an estimate until
then.

Pure: bytes in, payloads and `MeteredUsage` out. Payloads leave under our model's name and without
usage, whose fields may tell the gateway's own price.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from billing.events import Tier
from gateway.fleet.upstream.chunk_form import ChunkForm
from gateway.generation_events import MeteredUsage, RawBody, RawChunk, RawRun

BYTES_PER_TOKEN = 5
"""The assumed bytes per token where a chunk holds several tokens. A little more than English has,
so that chunks of one token, the rule, are counted as chunks; it errs in the client's favour."""
MAX_COUNT = 2**40
DONE = b"[DONE]"
MAX_MISSES = 8
"""Chunks in a row that were not like the one before; then none is compared any more."""

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None


class BrokenAnswer(Exception):
    """Says that an answer is no chat completion, or the upstream's own error event."""


class _PromptDetails(msgspec.Struct):
    cached_tokens: Count = None
    cache_write_tokens: Count = None


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: Count = None


class UpstreamUsage(msgspec.Struct):
    prompt_tokens: Annotated[int, Meta(ge=0, le=MAX_COUNT)]
    completion_tokens: Count = None
    total_tokens: Count = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None
    prompt_cache_hit_tokens: Count = None
    """DeepSeek's name for cached_tokens."""

    def to_metered(self) -> MeteredUsage:
        prompt = self.prompt_tokens
        details = self.prompt_tokens_details or _PromptDetails()
        cache_read = min(prompt, details.cached_tokens or self.prompt_cache_hit_tokens or 0)
        cache_write = min(prompt - cache_read, details.cache_write_tokens or 0)
        # Where reasoning is not part of completion_tokens (xAI, Gemini), it still is of the total.
        output = max(self.completion_tokens or 0, (self.total_tokens or 0) - prompt)
        reasoning = (self.completion_tokens_details or _CompletionDetails()).reasoning_tokens or 0
        return MeteredUsage(
            uncached_input=prompt - cache_read - cache_write,
            cache_read=cache_read,
            cache_write=cache_write,
            output=output,
            reasoning_output=min(output, reasoning),
        )


class _Choice(msgspec.Struct):
    index: int = 0
    delta: dict[str, Raw] | None = None
    message: dict[str, Raw] | None = None
    text: Raw = Raw(b"")
    """The text of a legacy completion."""
    finish_reason: str | None = None


_decode_object = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_choices = msgspec.json.Decoder(list[_Choice] | None).decode
_decode_usage = msgspec.json.Decoder(UpstreamUsage, strict=False).decode  # some count in floats
_encode = msgspec.json.Encoder().encode


def _to_form(data: bytes, sent: bytes, choices: list[_Choice]) -> ChunkForm | None:
    """Return the form of a chunk. None: it has not one text, or ends a choice."""
    if len(choices) != 1 or choices[0].finish_reason or not choices[0].delta:
        return None
    written = [value for _, value in _written(choices[0]) if len(value) > 2]
    if len(written) != 1 or written[0][:1] != b'"':
        return None
    return ChunkForm.of(data, written[0], sent)


def _written(choice: _Choice) -> list[tuple[str, bytes]]:
    """Return all that the model wrote, whatever the vendor calls it: content, reasoning,
    arguments."""
    fields = choice.delta or choice.message or {}
    values = [(name, bytes(raw)) for name, raw in fields.items() if name != "role"]
    if choice.text:
        values.append(("text", bytes(choice.text)))
    return [(name, value) for name, value in values if value[:1] in b'"[{']


def _holds_some(values: Raw | None) -> bool:
    return values is not None and bytes(values)[:1] == b"[" and bytes(values) != b"[]"


class UpstreamMeter:
    """A meter of one attempt. `usage` is monotone but for the step from the estimate to the
    upstream's own count."""

    def __init__(
        self,
        *,
        model: str,
        n: int,
        input_tokens: int,
        service_tier: Tier | None = None,
        embeds: bool = False,
    ) -> None:
        """`service_tier`: what the client is told that it was served as. None: what the upstream
        says. `embeds`: it is asked for vectors."""
        self._model = Raw(_encode(model))
        self._tier = None if service_tier is None else Raw(_encode(service_tier))
        self._n = n
        self._embeds = embeds
        self._known = MeteredUsage(uncached_input=input_tokens, estimated=True)
        if embeds:
            self._known = MeteredUsage(embedding_input=input_tokens, estimated=True)
        self._num_new_chunks = 0
        self._new_bytes = 0
        """The bytes of text that `_known` does not count yet."""
        self._finished: set[int] = set()
        self.done = False
        """`[DONE]` was read."""
        self.form: ChunkForm | None = None
        """The form of the last parsed chunk, if the next ones are worth comparing with it."""
        self._misses = 0

    @property
    def compares(self) -> bool:
        """Tell whether chunks of this stream are like the one before often enough."""
        return self._misses <= MAX_MISSES

    @property
    def complete(self) -> bool:
        """Tell whether nothing is missing, whether or not `[DONE]` was sent."""
        return self.done or len(self._finished) >= self._n

    @property
    def usage(self) -> MeteredUsage:
        if not self._num_new_chunks:
            return self._known
        by_size = self._new_bytes // BYTES_PER_TOKEN
        return msgspec.structs.replace(
            self._known,
            output=self._known.output + max(self._num_new_chunks, by_size),
            estimated=True,
        )

    def read_event(self, data: bytes) -> RawChunk | None:
        """Read one event's data; None if the client is not to see it. Raises BrokenAnswer."""
        if self.done:
            return None
        if data == DONE:
            self.done = True
            return None
        chunk, choices = self._open(data)
        tells_usage = self._take_usage(chunk)
        if tells_usage and not choices:
            return None
        sent = self._close(chunk)
        self._misses += 1
        self.form = None
        if self.compares and not tells_usage:
            self.form = _to_form(data, sent, choices)
        return RawChunk(sent)

    def read_run(self, stream: bytes) -> tuple[RawRun, int] | None:
        """Read the front of a stream that begins with an event: chunks like the one before, and the
        bytes that they took. None: the next event has to be parsed."""
        if self.form is None or self.done or (run := self.form.take(stream)) is None:
            return None
        self._misses = 0
        self._num_new_chunks += len(run.texts) - run.texts.count(b"")
        self._new_bytes += sum(map(len, run.texts))
        return RawRun(self.form.sent_before, run.texts, self.form.sent_after), run.size_bytes

    def read_body(self, data: bytes) -> RawBody:
        """A whole `chat.completion`, or what else was asked for. Raises BrokenAnswer."""
        body, choices = self._open(data)
        if not (_holds_some(body.get("data")) if self._embeds else choices):
            raise BrokenAnswer(f"an answer without {'data' if self._embeds else 'choices'}")
        self._take_usage(body)
        self.done = True
        return RawBody(self._close(body))

    def _open(self, data: bytes) -> tuple[dict[str, Raw], list[_Choice]]:
        try:
            found = _decode_object(data.decode())
            error = found.get("error")
            if error is not None and bytes(error) != b"null":
                raise BrokenAnswer("the upstream sent an error event")
            choices = _decode_choices(found.get("choices", b"[]")) or []
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
            raise BrokenAnswer(f"not a chat completion: {fault}") from fault
        for choice in choices:
            self._count(choice)
        return found, choices

    def _count(self, choice: _Choice) -> None:
        self._note(sum(len(value) - 2 for _, value in _written(choice)))  # quotes or brackets
        if choice.finish_reason:
            self._finished.add(choice.index)

    def _note(self, size_bytes: int) -> None:
        if size_bytes:
            self._num_new_chunks += 1
            self._new_bytes += size_bytes

    def _take_usage(self, found: dict[str, Raw]) -> bool:
        """Keep it where it says something; False where there is none."""
        raw = found.pop("usage", None)
        if raw is None or bytes(raw) == b"null":
            return False
        try:
            usage = _decode_usage(raw).to_metered()
        except msgspec.ValidationError:
            return True
        if not usage.prompt_tokens:  # there is no empty prompt: some send zeros until they count
            return True
        if self._embeds:
            usage = MeteredUsage(embedding_input=usage.prompt_tokens)
        self._known = usage
        if usage.output:  # zero, where there was text, is no count
            self._num_new_chunks = self._new_bytes = 0
        return True

    def _close(self, found: dict[str, Raw]) -> bytes:
        extension = found.get("x_groq")
        if extension is not None and bytes(extension)[:1] == b"{":
            fields = _decode_object(extension)
            if fields.pop("usage", None) is not None:
                found["x_groq"] = Raw(_encode(fields))
        found["model"] = self._model
        if self._tier is not None:
            found["service_tier"] = self._tier
        return _encode(found)
