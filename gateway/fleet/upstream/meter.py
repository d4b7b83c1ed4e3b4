"""Reads what an upstream says for what it costs: its usage where it gives one, an estimate until
then; neither beyond what the request can have used.

Pure: bytes in, payloads and `MeteredUsage` out. Payloads leave under our model's name and without
usage, whose fields may tell the gateway's own price. An answer that is longer than its upstream was
told to write ends where that bound is, for its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

from billing.events import Tier
from foundation.json_numbers import slow_number
from gateway.fleet.upstream.answer_bound import (
    BYTES_PER_TOKEN,
    TEXTS,
    AnswerBound,
    ends,
    shorten,
    text_bytes,
)
from gateway.fleet.upstream.bounds import InputBound
from gateway.fleet.upstream.chunk_form import ChunkForm
from gateway.fleet.upstream.usage_claim import UsageBound, bound_usage, read_claim
from gateway.generation_events import MeteredUsage, RawBody, RawChunk, RawRun

DONE = b"[DONE]"
TEXT_BEGINS = (b'"', b"n", b"[")
"""The first bytes of a text, null and a content in parts."""
MAX_MISSES = 8
"""Chunks in a row that were not like the one before; then none is compared any more."""
MAX_EMPTY_CHUNKS = 16_384
"""The chunks of one answer that have no text: roles, ends, signs of life."""


class BrokenAnswer(Exception):
    """Says that an answer is no chat completion, or the upstream's own error event."""


class _Choice(msgspec.Struct):
    index: int = 0
    delta: dict[str, Raw] | None = None
    message: dict[str, Raw] | None = None
    text: Raw = Raw(b"")
    """The text of a legacy completion."""
    finish_reason: str | None = None


_decode_object = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_choices = msgspec.json.Decoder(list[_Choice] | None).decode
_decode_shown = msgspec.json.Decoder(list[dict[str, Any]]).decode
_encode = msgspec.json.Encoder().encode


def _to_form(data: bytes, sent: bytes, choices: list[_Choice]) -> ChunkForm | None:
    """Return the form of a chunk. None: it has not one text, or ends a choice."""
    if len(choices) != 1 or choices[0].finish_reason or not choices[0].delta:
        return None
    written = [value for _, value in _written(choices[0]) if len(value) > 2]
    if len(written) != 1 or written[0][:1] != b'"':
        return None
    return ChunkForm.of(data, written[0], sent)


def _check_types(choice: _Choice) -> None:
    """Raises BrokenAnswer for a text that is a number, an object or a flag: clients are shown what
    is written as it comes."""
    fields = choice.delta or choice.message or {}
    for name in (*TEXTS, "role"):
        raw = choice.text if name == "text" else fields.get(name)
        if raw and bytes(raw)[:1] not in TEXT_BEGINS:
            raise BrokenAnswer(f"{name} is no text")


def _written(choice: _Choice) -> list[tuple[str, bytes]]:
    """Return all that the model wrote, whatever the vendor calls it: content, reasoning,
    arguments."""
    fields = choice.delta or choice.message or {}
    values = [(name, bytes(raw)) for name, raw in fields.items() if name != "role"]
    if choice.text:
        values.append(("text", bytes(choice.text)))
    return [(name, value) for name, value in values if value[:1] in b'"[{']


def counts_of(texts: Sequence[bytes]) -> tuple[int, int]:
    """Return how many of some chunks have text, and the bytes of that."""
    return len(texts) - texts.count(b""), sum(map(len, texts))


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
        most_input: InputBound,
        most_output_tokens: int,
        repeated_tokens: int = 0,
        service_tier: Tier | None = None,
        embeds: bool = False,
        is_plain: bool = False,
    ) -> None:
        """`input_tokens`: as they are estimated. `repeated_tokens`: of the prompt, which an answer
        repeats (`echo`). `service_tier`: what the client is told that it was served as. None: what
        the upstream says. `embeds`: it is asked for vectors. `is_plain`: a legacy completion."""
        self._model = Raw(_encode(model))
        self._tier = None if service_tier is None else Raw(_encode(service_tier))
        self._n = n
        self._embeds, self._is_plain = embeds, is_plain
        self._most_input, self._most_output = most_input, most_output_tokens
        self._answer = AnswerBound(most_output_tokens + repeated_tokens, n)
        estimate = min(input_tokens, most_input.of(input_tokens))
        self._known = MeteredUsage(uncached_input=estimate, estimated=True)
        if embeds:
            self._known = MeteredUsage(embedding_input=estimate, estimated=True)
        self._num_new_chunks = 0
        self._new_bytes = 0
        """The bytes of text that `_known` does not count yet."""
        self._num_chunks = self._num_bytes = self._num_empty = 0
        """They count the whole answer: chunks with text, the bytes of that, and chunks without."""
        self._last: dict[str, Raw] = {}
        """The last chunk that was parsed."""
        self._finished: set[int] = set()
        self.is_over = False
        """The answer has passed its bound: nothing more of it is passed on but `cut`."""
        self.done = False
        """`[DONE]` was read, or the answer was cut."""
        self.form: ChunkForm | None = None
        """The form of the last parsed chunk, if the next ones are worth comparing with it."""
        self._misses = 0

    @property
    def num_texts(self) -> int:
        """Return how many chunks had text."""
        return self._num_chunks

    @property
    def most_told_tokens(self) -> int:
        """Return the tokens that it was told to write, with those that it repeats."""
        return self._answer.tokens

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
        written = self._known.output + max(self._num_new_chunks, by_size)
        return msgspec.structs.replace(
            self._known, output=min(self._most_output, written), estimated=True
        )

    def read_event(self, data: bytes) -> RawChunk | None:
        """Read one event's data; None if the client is not to see it. Raises BrokenAnswer."""
        if self.done:
            return None
        if data == DONE:
            self.done = True
            return None
        num_before, bytes_before = self._num_chunks, self._num_bytes
        chunk, choices = self._open(data)
        tells_usage = self._take_usage(chunk)
        if self._answer.is_passed(self._num_chunks, self._num_bytes):
            self.is_over = True
            self._finished -= {each.index for each in choices if each.finish_reason}
            return self._begin_of(chunk, num_before, bytes_before)
        self._note_empty(num_before)
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
        num_chunks, num_bytes = counts_of(run.texts)
        if self._answer.is_passed(self._num_chunks + num_chunks, self._num_bytes + num_bytes):
            within = self._answer.num_within(run.texts, self._num_chunks, self._num_bytes)
            if not within:
                return None
            run = run.first(within)
            num_chunks, num_bytes = counts_of(run.texts)
        self._misses = 0
        self._num_empty += len(run.texts) - num_chunks
        self._add(num_chunks, num_bytes, num_bytes)
        return RawRun(self.form.sent_before, run.texts, self.form.sent_after), run.size_bytes

    def cut(self) -> RawChunk:
        """Return the chunk that ends an answer that has passed its bound."""
        self.done = True
        self._dispute(self._num_bytes)
        open_choices = [index for index in range(self._n) if index not in self._finished]
        return RawChunk(
            self._close({**self._last, "choices": ends(open_choices, is_plain=self._is_plain)})
        )

    def read_body(self, data: bytes) -> RawBody:
        """A whole `chat.completion`, or what else was asked for. Raises BrokenAnswer."""
        body, choices = self._open(data)
        if not (_holds_some(body.get("data")) if self._embeds else choices):
            raise BrokenAnswer(f"an answer without {'data' if self._embeds else 'choices'}")
        self._take_usage(body)
        self.done = True
        if not self._embeds:
            self._shorten(body, choices, len(data))
        return RawBody(self._close(body))

    def _shorten(self, body: dict[str, Raw], choices: list[_Choice], size_bytes: int) -> None:
        """Cut what is longer than it was told to be. `size_bytes`: of all of the answer."""
        overcounts = self._known.disputed_output > 0
        most = self._answer.most_bytes_of_choice(is_overcounted=overcounts)
        if size_bytes <= most:
            return
        sizes = [sum(text_bytes(value) for _, value in _written(each)) for each in choices]
        if all(size <= most for size in sizes):
            return
        shown = zip(_decode_shown(body["choices"]), sizes, strict=True)
        cut = [shorten(choice, most) if size > most else choice for choice, size in shown]
        body["choices"] = Raw(_encode(cut))
        self._dispute(sum(sizes))

    def _begin_of(
        self, chunk: dict[str, Raw], num_before: int, bytes_before: int
    ) -> RawChunk | None:
        """Return as much of a chunk's text as is within the bound. None: nothing."""
        left = self._answer.most_bytes - bytes_before
        if left <= 0 or num_before + 1 < self._num_chunks or num_before >= self._answer.tokens:
            return None
        cut = [shorten(each, left) for each in _decode_shown(chunk["choices"])]
        for each in cut:
            each["finish_reason"] = None
        return RawChunk(self._close({**chunk, "choices": Raw(_encode(cut))}))

    def _add(self, num_chunks: int, size_bytes: int, num_bytes: int) -> None:
        self._num_new_chunks += num_chunks
        self._new_bytes += size_bytes
        self._num_chunks += num_chunks
        self._num_bytes += num_bytes

    def _dispute(self, size_bytes: int) -> None:
        """Dispute what was written beyond the bound, unless the upstream has claimed it."""
        if not self._known.disputed_output:
            more = size_bytes // BYTES_PER_TOKEN - self._most_output
            self._known = msgspec.structs.replace(self._known, disputed_output=max(1, more))

    def _note_empty(self, num_before: int) -> None:
        """Raises BrokenAnswer."""
        self._num_empty += num_before == self._num_chunks
        if self._num_empty > MAX_EMPTY_CHUNKS:
            raise BrokenAnswer(f"more than {MAX_EMPTY_CHUNKS} chunks without text")

    def _open(self, data: bytes) -> tuple[dict[str, Raw], list[_Choice]]:
        if slow := slow_number(data):
            raise BrokenAnswer(slow.reason)
        try:
            found = _decode_object(data.decode())
            error = found.get("error")
            if error is not None and bytes(error) != b"null":
                raise BrokenAnswer("the upstream sent an error event")
            choices = _decode_choices(found.get("choices", b"[]")) or []
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
            raise BrokenAnswer(f"not a chat completion: {fault}") from fault
        if len(choices) > self._n:
            raise BrokenAnswer(f"{len(choices)} choices of {self._n}")
        for choice in choices:
            if not 0 <= choice.index < self._n:
                raise BrokenAnswer(f"choice {choice.index} of {self._n}")
            _check_types(choice)
            self._count(choice)
        self._last = found
        return found, choices

    def _count(self, choice: _Choice) -> None:
        size_bytes = num_bytes = 0
        for _, value in _written(choice):
            size_bytes += len(value) - 2  # quotes or brackets
            num_bytes += text_bytes(value)
        if size_bytes:
            self._add(1, size_bytes, num_bytes)
        if choice.finish_reason:
            self._finished.add(choice.index)

    def _take_usage(self, found: dict[str, Raw]) -> bool:
        """Keep it where it says something; False where there is none."""
        raw = found.pop("usage", None)
        if raw is None or bytes(raw) == b"null":
            return False
        usage = read_claim(raw)
        if usage is None:
            return True
        if self._embeds:
            usage = MeteredUsage(embedding_input=usage.prompt_tokens)
        most_input = self._most_input.of(usage.prompt_tokens)
        usage = bound_usage(usage, UsageBound(most_input, self._most_output))
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
