"""Tells where an answer is longer than its upstream was told to write, and ends it there.

Pure. Nobody here knows the upstream's tokens, so an answer passes its bound only where no honest
one could: a stream has more chunks than tokens, for a chunk has a token at least, and more bytes
than usual tokens have, for who cuts text into smaller chunks; any answer has more bytes than tokens
of LONG_TOKEN_BYTES would have. What is cut off beyond is given, not billed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

BYTES_PER_TOKEN = 5
"""The assumed bytes per token where a chunk holds several tokens. A little more than English has,
so that chunks of one token, the rule, are counted as chunks; it errs in the client's favour."""
OVERCOUNTED_BYTES_PER_TOKEN = 8
"""The same for an answer in one piece that has too many tokens by its upstream's own count."""
LONG_TOKEN_BYTES = 64
"""No vocabulary's tokens are as long on average, over an answer longer than SLACK_BYTES."""
SLACK_BYTES = 256
STRUCTURE_PER_TEXT = 16
"""How many bytes of an array (calls, details of reasoning) stand for a byte of text: most of them
are names and ids, which no model wrote."""
TEXTS = ("reasoning_content", "reasoning", "content", "refusal", "text")
"""The fields that a model writes as text, in the order in which it writes them."""

Fields = dict[str, Any]


def text_bytes(value: bytes) -> int:
    """Return the size of what a model wrote. `value`: its JSON."""
    return len(value) - 2 if value[:1] == b'"' else len(value) // STRUCTURE_PER_TEXT


class AnswerBound(msgspec.Struct, frozen=True):
    """The tokens that an upstream was told to write at most, over all `n` choices."""

    tokens: int
    n: int

    def is_passed(self, num_chunks: int, num_bytes: int) -> bool:
        return min(num_chunks, num_bytes // BYTES_PER_TOKEN) > self.tokens or (
            num_bytes > self.most_bytes
        )

    @property
    def most_bytes(self) -> int:
        return self.tokens * LONG_TOKEN_BYTES + SLACK_BYTES * self.n

    def num_within(self, texts: Sequence[bytes], num_chunks: int, num_bytes: int) -> int:
        """Return how many of some chunks' texts, from the first on, are within the bound.
        `num_chunks`, `num_bytes`: those of what came before."""
        for position, text in enumerate(texts):
            num_chunks += bool(text)
            num_bytes += len(text)
            if self.is_passed(num_chunks, num_bytes):
                return position
        return len(texts)

    def most_bytes_of_choice(self, *, is_overcounted: bool) -> int:
        """Return the size of one choice of an answer in one piece. `is_overcounted`: it has too
        many tokens by its upstream's own count."""
        per_token = OVERCOUNTED_BYTES_PER_TOKEN if is_overcounted else LONG_TOKEN_BYTES
        return self.tokens // self.n * per_token + SLACK_BYTES


def shorten(choice: Fields, most_bytes: int) -> Fields:
    """Return a choice with no more than so many bytes of text, which ends for its length. Calls and
    the like that do not fit are left out whole, and so are logprobs."""
    left = most_bytes
    shortened = {**choice, "finish_reason": "length", "logprobs": None}
    for place in ("delta", "message"):
        if isinstance(said := choice.get(place), dict):
            shortened[place], left = _shortened(said, left)
    if isinstance(choice.get("text"), str):
        shortened["text"] = _cut(choice["text"], left)
    return shortened


def _shortened(said: Fields, left: int) -> tuple[Fields, int]:
    found = dict(said)
    for name in (*TEXTS, *(each for each in said if each not in TEXTS)):
        value = said.get(name)
        if name == "role" or not value:
            continue
        if isinstance(value, str):
            found[name] = _cut(value, left)
            left -= len(found[name].encode())
        elif isinstance(value, list | dict):
            left -= text_bytes(msgspec.json.encode(value))
            if left < 0:
                found[name], left = None, 0
    return found, left


def _cut(text: str, most_bytes: int) -> str:
    return text.encode(errors="replace")[:most_bytes].decode(errors="ignore")


def ends(choices: Sequence[int], *, is_plain: bool) -> Raw:
    """Return the `choices` of a chunk that ends some for their length. `is_plain`: of a legacy
    completion."""
    said: Fields = {"text": ""} if is_plain else {"delta": {}}
    found = [{"index": index, **said, "finish_reason": "length"} for index in choices]
    return Raw(msgspec.json.encode(found))
