"""Finds the message of a conversation that a token of its prompt lies in: told of a place where a
prefix broke, so that its customer finds it.

Pure. A template does not say where it puts a message, so the conversation before it is rendered
alone: as far as that and the whole prompt are the same text it lies behind. Of n messages some
log2(n) are tried. What a template puts elsewhere is not found, and then nothing is said.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from engine.errors import InvalidRequest
from engine.text.tokenizer import Tokenizer
from gateway.fleet.engine.kept_prefixes import Render, common_chars, render_before
from gateway.fleet.replica import MessagePlace
from gateway.generate_request import ChatPrompt, PromptPlace

BROKEN = "\ufffd"
"""The replacement character, which an incomplete UTF-8 sequence decodes to."""


def chars_before(
    tokenizer: Tokenizer, text: str, token_ids: Sequence[int], position: int
) -> int | None:
    """Return where in the text the token at `position` begins. None: another rendering had these
    ids."""
    decoded = tokenizer.decode([*token_ids[:position]], False).rstrip(BROKEN)
    if text.startswith(decoded):
        return len(decoded)
    ids, ends = tokenizer.encode_with_ends(text)
    if ids[: position + 1] != [*token_ids[: position + 1]]:
        return None
    return ends[position - 1] if position else 0


def place_at(prompt: ChatPrompt, text: str, at: int, render: Render) -> MessagePlace | None:
    """Return what character `at` of the whole prompt's text lies in; None: in no message."""
    if prompt.tools is not None and is_in_tools(prompt, text, at, render):
        return MessagePlace("tools")
    messages = prompt.messages

    def end_of(index: int) -> int:
        """Return the end of a message, no less than of those before it."""
        place = PromptPlace(num_messages=index + 1)
        return common_chars(render_before(messages, place, render), text)

    index = bisect_right(range(len(messages)), at, key=end_of)
    begins = 0 if index == 0 else end_of(index - 1)
    if index == len(messages) or (index and not begins) or not begins <= at < end_of(index):
        return None
    return MessagePlace(prompt.path_of(index), index, messages[index]["role"])


def is_in_tools(prompt: ChatPrompt, text: str, at: int, render: Render) -> bool:
    """Tell whether a character lies in the tools, by what is missing where none are shown."""
    try:
        without, shown = render(prompt.messages, 0), render(prompt.messages, None)
    except InvalidRequest:
        return False
    begins = common_chars(without, shown)
    behind = common_chars(without[begins:][::-1], shown[begins:][::-1])
    return begins <= at < len(shown) - behind and text.startswith(shown[:at])
