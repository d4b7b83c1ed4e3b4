"""Estimates how many tokens a body that goes to an upstream has: what is reserved before the
upstream has counted.

Knows no HTTP. The upstream's own count replaces this one as soon as it is there; where it never
comes, this one is billed and marked as an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

ASCII_BYTES_PER_TOKEN = 4
"""English text in the vocabularies of 2023 and later."""
OTHER_BYTES_PER_TOKEN = 3
"""UTF-8 bytes outside ASCII: about a token per CJK character, one per one and a half Cyrillic
ones.
"""
TOKENS_PER_MESSAGE = 4
"""Role and delimiters."""
TOKENS_PER_MEDIUM = 1000
"""An image, a file or a sound, of which no size in tokens is known here."""


Encode = Callable[[str], Sequence[int]]


def estimate_input_tokens(body: dict[str, Any], encode: Encode | None) -> int:
    """Estimate the tokens of a body, at least 1. `body`: a chat completion's, as
    `wire.openai.forward` has checked it."""
    texts, num_media = parts_of(body)
    text = "\n".join(texts)
    counted = estimate_tokens(text) if encode is None else len(encode(text))
    framing = TOKENS_PER_MESSAGE * len(body["messages"]) + TOKENS_PER_MEDIUM * num_media
    return max(1, counted + framing)


def estimate_tokens(text: str) -> int:
    """Estimate by length: no vocabulary is known."""
    if text.isascii():
        return math.ceil(len(text) / ASCII_BYTES_PER_TOKEN)
    size = len(text.encode(errors="replace"))
    ascii_size = len(text.encode("ascii", errors="ignore"))
    other_size = size - ascii_size
    return math.ceil(ascii_size / ASCII_BYTES_PER_TOKEN + other_size / OTHER_BYTES_PER_TOKEN)


def parts_of(body: dict[str, Any]) -> tuple[list[str], int]:
    """Return every text that the model will read, and how many parts are no text."""
    texts: list[str] = []
    num_media = 0
    for message in body["messages"]:
        content = message.get("content")
        for part in [content] if isinstance(content, str) else content or ():
            text = part if isinstance(part, str) else part.get("text")
            if isinstance(text, str):
                texts.append(text)
            else:
                num_media += 1
        texts += json_of(message, "tool_calls", "function_call")
    texts += json_of(body, "tools", "functions", "response_format")
    return texts, num_media


def json_of(fields: dict[str, Any], *names: str) -> list[str]:
    return [msgspec.json.encode(fields[name]).decode() for name in names if fields.get(name)]
