"""Bounds what a request may cost at an upstream: what it can read, and what it is told to write.

Pure. Under a hard cap on spending the bound of the input is held; without one the estimate is what
is reserved, and nothing is sent that was not asked for. No more than the bound is billed of either.

The argument, without a tokenizer: a vocabulary spends at most one token on a byte of UTF-8, so the
bytes of the body bound its texts, normalized in whatever way. To them come what a chat template
writes around each message and around all, and, of what it writes out anew (tools, schemas), as
much again. With the upstream's tokenizer the texts count as they are. An image counts as
`image_bound` says, whatever its bytes are. Files and videos are bounded by nothing that we see (a
document's text is compressed, a URL says nothing); nor is what is not a text of a message. Those
are refused under a cap, unless the configuration has the `context_window`, which no input exceeds.

What an upstream counts beyond is disputed (`usage_claim`): a template that writes more than that is
the operator's cost, and so is an upstream that reads or writes beyond its window or bound.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from foundation.normal_forms import size_decomposed
from gateway.fleet.replica import PreparedRequest
from gateway.fleet.upstream.image_bound import (
    IMAGE_TOKENS,
    is_image,
    parts_beside_text,
    total_of,
)
from gateway.fleet.upstream.input_estimate import (
    TOKENS_PER_MEDIUM,
    Encode,
    estimate_input_tokens,
    estimate_tokens,
    json_of,
    parts_of,
)
from gateway.generate_request import GenerateRequest, MaxTokensField, PlainPrompt
from gateway.generation_events import MeteredUsage
from gateway.request_errors import UnsupportedField

DEFAULT_MAX_OUTPUT_TOKENS = 16_384
"""Per choice, where neither the request nor the configuration has a limit."""
MOST_TOKENS = 2**21
"""The window of a model whose configuration has none: as much as any served today takes."""
MAX_ENCODED_BYTES = 4 * 2**20
"""A million tokens of English. A body that is larger counts by its bytes, as if no vocabulary were
known: it would keep one of few threads for ten seconds and more."""
MAX_TOKENS_FIELDS = ("max_completion_tokens", "max_tokens")
TEMPLATE_TOKENS_PER_MESSAGE = 16
TEMPLATE_TOKENS = 256
"""Around all: what a template says of itself, of the day and of how to answer."""
TEMPLATE_TOKENS_OF_TOOLS = 1024
"""How to call them; vendors state up to some 700."""
REWRITTEN = ("tools", "functions", "response_format")
"""With indents, quotes and words of the template's own."""
TEXT_FIELDS = frozenset(
    {
        *("role", "content", "name", "tool_calls", "function_call", "tool_call_id", "refusal"),
        *("reasoning", "reasoning_content", "reasoning_details", "prefix", "partial"),
        *("cache_control", "prompt_cache_breakpoint"),
    }
)
"""Fields of a message that become at most one token per byte."""
READS_MORE = ("chat_template", "data_sources")
"""Fields of a body that make an upstream read text that is not in the body."""


class InputSize(msgspec.Struct, frozen=True):
    estimate: int
    most: int | None
    """None: nobody asked, and it is not known anyway."""


class InputBound(msgspec.Struct, frozen=True):
    """The most tokens that an input can have."""

    surely: int
    """So many it may have, whatever `find` says: it need not be asked."""
    find: Callable[[], int]

    def of(self, claimed: int) -> int:
        """Return a bound that is enough to judge a claim."""
        return self.surely if claimed <= self.surely else self.find()


class UpstreamBounds(msgspec.Struct, frozen=True):
    """The bounds of an upstream, as its model is configured."""

    context_window: int | None
    max_output_tokens: int | None
    """Per choice, where the client names no bound."""
    field: MaxTokensField
    """The field for the output bound that the upstream knows."""
    encode: Encode | None
    image_tokens: int = IMAGE_TOKENS
    """The most that one image counts."""

    def input_size(self, body: dict[str, Any], payload: bytes, is_capped: bool) -> InputSize:
        """Raises: UnsupportedField, of what is capped and has no bound."""
        encode = self._encode_of(payload)
        estimate = estimate_input_tokens(body, encode)
        if is_capped and self.context_window is None:
            unbounded = unbounded_field(body)
            if unbounded is not None:
                raise UnsupportedField(
                    f"Unsupported parameter: '{unbounded}' is not supported under a hard cap on"
                    " spending: nobody could say what it costs before it is read.",
                    param=unbounded,
                )
        if not is_capped and encode is None and next(parts_beside_text(body), None) is None:
            return InputSize(estimate, None)
        return InputSize(estimate, self._most_input(body, payload, estimate))

    def _encode_of(self, payload: bytes) -> Encode | None:
        """Return the tokenizer for a body's texts. None: it would take too long."""
        return None if len(payload) > MAX_ENCODED_BYTES else self.encode

    def _most_input(self, body: dict[str, Any], payload: bytes, estimate: int) -> int:
        if unbounded_field(body) is not None:
            return self._window
        counted = None if self._encode_of(payload) is None else estimate
        most = most_input_tokens(body, payload, counted, self.image_tokens)
        return min(most, self.context_window or sys.maxsize)

    @property
    def _window(self) -> int:
        return self.context_window or MOST_TOKENS

    def most_input(
        self, prepared: PreparedRequest, to_body: Callable[[GenerateRequest], dict[str, Any]]
    ) -> InputBound:
        """Return the bound of the input that may be billed: what was held, or what is found when it
        matters."""
        held = prepared.most_input_tokens
        if held is not None:
            return InputBound(held, lambda: held)
        request, payload, estimate = prepared.request, prepared.payload, prepared.input_tokens
        if request.plain is None:
            surely = min(len(payload), self._window)
            return InputBound(surely, lambda: self._most_input(to_body(request), payload, estimate))
        prompts = request.plain.prompts
        return InputBound(
            min(estimate, self._window * len(prompts)),
            lambda: self._most_plain(prompts, payload, estimate),
        )

    def is_surely_false(
        self,
        usage: MeteredUsage,
        prepared: PreparedRequest,
        to_body: Callable[[GenerateRequest], dict[str, Any]],
    ) -> bool:
        """Tell whether a claim that is disputed can be the upstream's fault alone. What a part
        beside text counts as is up to its sender, too: with such parts a tenant could have an
        upstream rest, for all others as well."""
        if usage.disputed_output or usage.prompt_tokens + usage.disputed_input > self._window:
            return True
        request = prepared.request
        return request.plain is not None or next(parts_beside_text(to_body(request)), None) is None

    def most_output(self, prepared: PreparedRequest) -> int:
        """Return the tokens of output that may be billed, over all choices: as many as the upstream
        was told, or as its model writes."""
        request = prepared.request
        most = self._window * request.n
        if prepared.max_tokens_given or request.is_capped:
            return min(prepared.max_output_tokens, most)
        return min((self.max_output_tokens or self._window) * request.n, most)

    def plain_size(
        self, prompts: Sequence[PlainPrompt], payload: bytes, is_capped: bool
    ) -> InputSize:
        """Bound the size of prompts without a conversation, each of which may fill the window."""
        encode = self._encode_of(payload)
        estimate = sum(size_of(prompt, encode) for prompt in prompts)
        most = self._most_plain(prompts, payload, estimate) if is_capped else None
        return InputSize(estimate, most)

    def _most_plain(self, prompts: Sequence[PlainPrompt], payload: bytes, estimate: int) -> int:
        """Bound the tokens of prompts: those of ids, or of a tokenizer, are known; all else counts
        by its bytes."""
        if self._encode_of(payload) is None and any(isinstance(each, str) for each in prompts):
            most = most_bytes(payload)
        else:
            most = estimate + len(payload) - len(msgspec.json.encode(prompts))
        most += TEMPLATE_TOKENS_PER_MESSAGE * len(prompts)
        return most if self.context_window is None else min(most, self._window * len(prompts))

    def output(self, body: dict[str, Any], size: InputSize, *, is_capped: bool) -> tuple[int, bool]:
        """Return the tokens per choice, and whether the client set them. With an input at its most
        both fit the window, or half of what the estimate leaves of it is kept free: many upstreams
        refuse a bound that does not fit."""
        given = [body[name] for name in MAX_TOKENS_FIELDS if body.get(name)]
        if given:
            return max(given), True
        window, default = self.context_window, self.max_output_tokens
        if window is None:
            return default or DEFAULT_MAX_OUTPUT_TOKENS, False
        left = window - size.estimate
        if is_capped and size.most is not None:
            left = max(window - size.most, left // 2)
        return max(1, left if default is None else min(left, default)), False

    def with_bound(self, payload: bytes, max_tokens: int) -> bytes:
        """Tell the upstream the bound. `payload`: a JSON object with some field, and none of
        MAX_TOKENS_FIELDS."""
        return b'%b,"%b":%d}' % (payload[:-1], self.field.encode(), max_tokens)

    def with_new_bound(self, payload: bytes, max_tokens: int) -> bytes:
        """Tell the upstream another bound. `payload`: as `told` has left it."""
        return self.with_bound(payload[: payload.rindex(b",")] + b"}", max_tokens)


def size_of(prompt: PlainPrompt, encode: Encode | None) -> int:
    if not isinstance(prompt, str):
        prompt.check()
        return len(prompt)
    return max(1, estimate_tokens(prompt) if encode is None else len(encode(prompt)))


def without_bound(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body that names no bound, without the fields that are null."""
    return {name: value for name, value in body.items() if name not in MAX_TOKENS_FIELDS}


def names_bound(body: dict[str, Any]) -> bool:
    return any(body.get(name) for name in MAX_TOKENS_FIELDS)


def most_input_tokens(
    body: dict[str, Any], payload: bytes, counted: int | None, image_tokens: int
) -> int:
    """Bound the tokens of the input. `counted`: the estimate with what a tokenizer found in the
    texts; what else there is counts by its bytes, and each image as `image_tokens`."""
    most = most_bytes(payload)
    if counted is not None:
        texts, num_media = parts_of(body)
        most = counted + len(payload) - sum(len(text.encode(errors="replace")) for text in texts)
        most -= TOKENS_PER_MEDIUM * num_media
    images = total_of(body)
    most += image_tokens * images.num_images - images.data_bytes
    most += TEMPLATE_TOKENS + TEMPLATE_TOKENS_PER_MESSAGE * len(body["messages"])
    if body.get("tools") or body.get("functions"):
        most += TEMPLATE_TOKENS_OF_TOOLS
    return most + sum(most_bytes(text.encode()) for text in json_of(body, *REWRITTEN))


def most_bytes(data: bytes) -> int:
    """Bound the bytes of a text in UTF-8, in whatever normal form its reader brings it."""
    if data.isascii():
        return len(data)
    text = data.decode(errors="replace")
    return max(len(data), size_decomposed("NFD", text), size_decomposed("NFKD", text))


def unbounded_field(body: dict[str, Any]) -> str | None:
    """Return the first field that may be more tokens than it has bytes."""
    for name in READS_MORE:
        if body.get(name) is not None:
            return name
    for position, message in enumerate(body["messages"]):
        for name, value in message.items():
            if name not in TEXT_FIELDS and value is not None:
                return f"messages[{position}].{name}"[:100]
    return next((path for path, part in parts_beside_text(body) if not is_image(part)), None)
