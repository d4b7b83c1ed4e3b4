"""One choice's text to what it means: content, reasoning and calls, while it comes.

Knows no token and no wire format.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from engine.text.output_parser.reading.deltas import Delta
from engine.text.output_parser.reading.reader import MAX_CALLS, Reader, Steps
from engine.text.output_parser.reasoning import Reasoning, ReasoningState


class OutputParser:
    """However a text is cut into feeds, its deltas concatenate to the same; and all of it is in
    them, but for the markers of the format and white space around those."""

    def __init__(
        self,
        read: Callable[[Reader], Steps[None]] | None,
        *,
        tools: Collection[str] = (),
        max_calls: int = MAX_CALLS,
        reasoning: Reasoning | None = None,
        reasoning_state: ReasoningState = "unsaid",
    ) -> None:
        """`read`: the family's; None: nothing can be called. `reasoning_state`: of the prompt."""
        self._reader = Reader(tools, max_calls)
        self._read = read
        self._reasoning = reasoning
        self._reasoning_state = reasoning_state
        self._steps = self._all()
        next(self._steps)

    def feed(self, text: str) -> list[Delta]:
        """Return what is sure now."""
        self._reader.push(text)
        next(self._steps)
        return self._reader.take()

    def finish(self) -> list[Delta]:
        """The rest, once no more comes."""
        self._reader.end()
        for _ in self._steps:
            raise AssertionError("a parser that waits for more at the end")
        return self._reader.take()

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next is thought, as far as is known."""
        return self._reader.in_reasoning

    @property
    def ends_with_calls(self) -> bool:
        """Whether a text that ends here ended in order to call: there is a call, and the last one
        has all of its arguments. Else it ended for the reason that it ended for."""
        return self._reader.num_calls > 0 and self._reader.is_whole

    def _all(self) -> Steps[None]:
        yield
        reader = self._reader
        if self._reasoning is not None:
            yield from self._reasoning.read(reader, self._reasoning_state)
        if self._read is not None:
            yield from self._read(reader)
        yield from reader.pass_on()
        if not reader.num_calls:
            reader.show_white()
