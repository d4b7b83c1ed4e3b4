"""Reads `prompt` and `input` of OpenAI's older routes: a text, several, token ids, or several lists
of them.

Knows no tokenizer: which ids there are, a replica says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeVar

from msgspec import Meta

from gateway.generate_request import PlainPrompt
from gateway.request_errors import BadField, UnsupportedField
from gateway.wire.shared.refusals import TokenId

T = TypeVar("T")
KINDS = {int: "token ids", str: "texts", list: "lists of token ids"}

PlainPrompts = str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
"""As a client writes one or several."""


def to_prompts(written: PlainPrompts, field: str, most: int) -> tuple[PlainPrompt, ...]:
    """Return the prompts, at most so many and none of them empty. Raises BadField, which names the
    place."""
    if isinstance(written, str):
        found: Sequence[PlainPrompt] = (written,)
    elif isinstance(written[0], int):
        found = (_alike(written, int, field),)
    elif isinstance(written[0], str):
        found = _alike(written, str, field)
    else:
        found = _alike(written, list, field)
    if len(found) > most:
        raise BadField(
            f"Invalid value for '{field}': {len(found)} prompts, of which at most {most} can stand"
            " here.",
            param=field,
            detail="This is more than can stand here.",
        )
    for index, each in enumerate(found):
        if not each:
            param = field if len(found) == 1 else f"{field}[{index}]"
            raise BadField(f"Invalid value for '{param}': it is empty.", param=param)
    return tuple(found)


def _alike(written: Sequence[object], kind: type[T], field: str) -> list[T]:
    found: list[T] = []
    for index, each in enumerate(written):
        if not isinstance(each, kind):
            param = f"{field}[{index}]"
            message = f"Invalid type for '{param}': the first one says that all are {KINDS[kind]}."
            raise BadField(message, param=param)
        found.append(each)
    return found


def not_of_an_upstream() -> UnsupportedField:
    message = "Unsupported parameter: 'model' is an upstream's, whose tokens are not known here."
    return UnsupportedField(message, param="model")
