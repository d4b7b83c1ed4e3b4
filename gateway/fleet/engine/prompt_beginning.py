"""Tells how a prompt begins, in characters, where nobody here knows its tokens: an upstream's
prefixes are told apart by it.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from gateway.fleet.engine.cache_outcome import digest
from gateway.generate_request import GenerateRequest

PREFIX_CHARS = 512
"""About as much as `cache_outcome.PREFIX_TOKENS`."""


def text_digest(namespace: str, request: GenerateRequest) -> str:
    """Return the digest of the first `PREFIX_CHARS` of its texts; empty where there are fewer."""
    found: list[str] = []
    missing = PREFIX_CHARS
    for text in texts_of(request):
        found.append(text[:missing])
        missing -= len(found[-1])
        if not missing:
            return digest(namespace, "".join(found).encode(errors="replace"))
    return ""


def texts_of(request: GenerateRequest) -> Iterator[str]:
    """Yield the texts in order; with their roles, which are part of what is compared."""
    if request.plain is not None:
        for prompt in request.plain.prompts:
            yield prompt if isinstance(prompt, str) else " ".join(map(str, prompt[:PREFIX_CHARS]))
    elif request.prompt is not None:
        yield from texts_of_messages(request.prompt.messages)
    elif request.forward is not None:
        yield from texts_of_messages(request.forward["messages"])


def texts_of_messages(messages: Iterable[dict[str, Any]]) -> Iterator[str]:
    for message in messages:
        yield str(message.get("role"))
        content = message.get("content")
        for part in [content] if isinstance(content, str) else content or ():
            text = part if isinstance(part, str) else part.get("text")
            if isinstance(text, str):
                yield text
