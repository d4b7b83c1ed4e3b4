"""Bounds what a request may cost at an upstream: what it can read, and what it is told to write.

Pure. Only under a hard cap on spending is the input bounded; without one the estimate is what is
reserved, and nothing is sent that was not asked for.

The argument, without a tokenizer: a vocabulary spends at most one token on a byte of UTF-8, so the
bytes of the body bound its texts, normalized in whatever way. To them come what a chat template
writes around each message and around all, and, of what it writes out anew (tools, schemas), as
much again. With the upstream's tokenizer the texts count as they are. Images, files and sounds are
bounded by nothing that we see; nor is what is not a text of a message. Those are refused, unless
the configuration has the `context_window`, which no input exceeds.

What remains: a template that writes more than that, and an upstream that reads or writes beyond its
window or bound, or does not know the field that the client named the bound in.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.fleet.upstream.input_estimate import (
    Encode,
    estimate_input_tokens,
    estimate_tokens,
    json_of,
    parts_of,
)
from gateway.generate_request import MaxTokensField, PlainPrompt
from gateway.request_errors import UnsupportedField

DEFAULT_MAX_OUTPUT_TOKENS = 16_384
"""Per choice, where neither the request nor the configuration has a limit."""
MAX_TOKENS_FIELDS = ("max_completion_tokens", "max_tokens")
TEMPLATE_TOKENS_PER_MESSAGE = 16
TEMPLATE_TOKENS = 256
"""Around all: what a template says of itself, of the day and of how to answer."""
TEMPLATE_TOKENS_OF_TOOLS = 1024
"""How to call them; vendors state up to some 700."""
REWRITTEN = ("tools", "functions", "response_format")
"""With indents, quotes and words of the template's own."""
TEXT_PARTS = ("text", "refusal")
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
    """None: nobody asked."""


class UpstreamBounds(msgspec.Struct, frozen=True):
    """The bounds of an upstream, as its model is configured."""

    context_window: int | None
    max_output_tokens: int | None
    """Per choice, where the client names no bound."""
    field: MaxTokensField
    """That the upstream knows."""
    encode: Encode | None

    def input_size(self, body: dict[str, Any], payload: bytes, is_capped: bool) -> InputSize:
        """Raises: UnsupportedField, of what is capped and has no bound."""
        estimate = estimate_input_tokens(body, self.encode)
        if not is_capped:
            return InputSize(estimate, None)
        window, unbounded = self.context_window, unbounded_field(body)
        if unbounded is not None:
            if window is None:
                raise UnsupportedField(
                    f"Unsupported parameter: '{unbounded}' is not supported under a hard cap on"
                    " spending: nobody could say what it costs before it is read.",
                    param=unbounded,
                )
            return InputSize(estimate, window)
        most = most_input_tokens(body, payload, None if self.encode is None else estimate)
        return InputSize(estimate, most if window is None else min(most, window))

    def plain_size(
        self, prompts: Sequence[PlainPrompt], payload: bytes, is_capped: bool
    ) -> InputSize:
        """Bound the size of prompts without a conversation, each of which may fill the window."""
        estimate = sum(size_of(prompt, self.encode) for prompt in prompts)
        if not is_capped:
            return InputSize(estimate, None)
        most = most_bytes(payload) + TEMPLATE_TOKENS_PER_MESSAGE * len(prompts)
        window = self.context_window
        return InputSize(estimate, most if window is None else min(most, window * len(prompts)))

    def output(self, body: dict[str, Any], size: InputSize) -> tuple[int, bool]:
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
        if size.most is not None:
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


def most_input_tokens(body: dict[str, Any], payload: bytes, counted: int | None) -> int:
    """Bound the tokens of the input. `counted`: what a tokenizer found in the texts; what else
    there is counts by its bytes."""
    most = most_bytes(payload)
    if counted is not None:
        texts, _ = parts_of(body)
        most = counted + len(payload) - sum(len(text.encode(errors="replace")) for text in texts)
    most += TEMPLATE_TOKENS + TEMPLATE_TOKENS_PER_MESSAGE * len(body["messages"])
    if body.get("tools") or body.get("functions"):
        most += TEMPLATE_TOKENS_OF_TOOLS
    return most + sum(most_bytes(text.encode()) for text in json_of(body, *REWRITTEN))


def most_bytes(data: bytes) -> int:
    """Bound the bytes of a text in UTF-8, in whatever normal form its reader brings it."""
    if data.isascii():
        return len(data)
    text = data.decode(errors="replace")
    decomposed = (unicodedata.normalize("NFD", text), unicodedata.normalize("NFKD", text))
    return max(len(data), *(len(each.encode()) for each in decomposed))


def unbounded_field(body: dict[str, Any]) -> str | None:
    """Return the first field that may be more tokens than it has bytes."""
    for name in READS_MORE:
        if body.get(name) is not None:
            return name
    for position, message in enumerate(body["messages"]):
        for name, value in message.items():
            if name not in TEXT_FIELDS and value is not None:
                return f"messages[{position}].{name}"[:100]
        content = message.get("content")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if part.get("type") not in TEXT_PARTS:
                return f"messages[{position}].content[{index}]"
    return None
