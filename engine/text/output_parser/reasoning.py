"""Separates what a model thought from what it answers: between two markers at the very beginning.

Of the new lines around it those at its markers belong to them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.text.output_parser.reading.deltas import ReasoningDelta
from engine.text.output_parser.reading.reader import Reader, Steps

ReasoningState = Literal["open", "closed", "unsaid"]
"""The state of the reasoning at the end of a prompt: begun (open), none to come (closed), or left
to the model (unsaid)."""


class Reasoning(msgspec.Struct, frozen=True):
    opens: str
    closes: str

    def state(self, prompt: str) -> ReasoningState:
        """By the end of a rendered prompt, which the template wrote, not its user."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.opens):
            return "open"
        return "closed" if prompt.endswith(self.closes) else "unsaid"

    def read(self, reader: Reader, state: ReasoningState) -> Steps[None]:
        if state != "open":
            reader.show_content((yield from reader.skip()))
            if not (yield from reader.literal(self.opens)):
                return
            reader.drop_white()
        reader.in_reasoning = True
        yield from reader.skip("\n")
        is_closed = yield from reader.pass_on(self.closes, ReasoningDelta)
        reader.in_reasoning = False
        if not is_closed:
            reader.show_white(ReasoningDelta)
            return
        reader.drop_white()
        yield from reader.literal(self.closes)
        yield from reader.skip("\n")


THINK = Reasoning("<think>", "</think>")
"""DeepSeek R1, Qwen 3 and many others."""
MISTRAL_THINK = Reasoning("[THINK]", "[/THINK]")
