"""A text that is still coming, as the parsers of a family read it: generators that yield where they
need more of it.

Knows what a call is and no family's way to write one.

What comes of a text does not depend on how it was cut: nothing here asks how much has come, only
what comes next. A call is tried: until it has begun, its text is kept, and becomes content if it
turns out to be none. From then on it stands, with as much of its arguments as is JSON; what does
not fit becomes content. White space around calls belongs to the format.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from typing import TypeAlias, TypeVar

import msgspec

from engine.text.output_parser.reading.deltas import (
    ArgumentsDelta,
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallStart,
)
from engine.text.output_parser.reading.json_text import JsonText

MAX_CALLS = 128
"""The bound on calls of one output; text follows them."""
MAX_HELD_CHARS = 16 * 1024
"""Bounds the text between where a call may begin and where it does: markers, its name and, in some
orders, its arguments."""
MAX_WHITE_CHARS = 1024
"""The bound on whitespace that may belong to the text or to the format."""
WHITE = " \t\n\r"

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""Yields where more of the text has to come; returns what it found."""
Shown: TypeAlias = type[ContentDelta] | type[ReasoningDelta]


class NotACall(Exception):
    """An error that says that what was tried is no call, or breaks off within its arguments."""


class Reader:
    def __init__(self, tools: Collection[str], max_calls: int = MAX_CALLS) -> None:
        """`tools`: that can be called; whatever else is named is text."""
        self._tools = frozenset(tools)
        self._max_calls = min(max_calls, MAX_CALLS)
        self._text = ""
        """The received text, from the first character that is still needed."""
        self._at = 0
        """The place up to which it is read."""
        self._tried_from: int | None = None
        """The start of a possible call that is not recognized yet."""
        self._ended = False
        self._white = ""
        """Read, and of the text or of the format."""
        self._deltas: list[Delta] = []
        self.num_calls = 0
        self.is_whole = True
        """The last call has all of its arguments."""
        self.in_reasoning = False

    # ---- for who feeds it

    def push(self, text: str) -> None:
        needed = self._at if self._tried_from is None else self._tried_from
        self._text = self._text[needed:] + text
        self._at -= needed
        if self._tried_from is not None:
            self._tried_from = 0

    def end(self) -> None:
        """No more comes."""
        self._ended = True

    def take(self) -> list[Delta]:
        """Return what was found since it was last asked for."""
        found, self._deltas = self._deltas, []
        return found

    # ---- what comes next

    def peek(self) -> Steps[str]:
        """The next character; none at the end. Raises NotACall where too much is held."""
        if self._tried_from is not None and self._at - self._tried_from > MAX_HELD_CHARS:
            raise NotACall
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def literal(self, expected: str) -> Steps[bool]:
        """Read `expected`, or nothing if something else comes."""
        while not self._text.startswith(expected, self._at):
            if self._ended or not expected.startswith(self._text[self._at :]):
                return False
            yield
        self._at += len(expected)
        return True

    def skip(self, chars: str = WHITE) -> Steps[str]:
        """Read as many of these characters as come, `MAX_WHITE_CHARS` at most."""
        skipped: list[str] = []
        while len(skipped) < MAX_WHITE_CHARS:
            char = yield from self.peek()
            if not char or char not in chars:
                break
            skipped.append(char)
            self._at += 1
        return "".join(skipped)

    def up_to(self, marker: str) -> Steps[str]:
        """Read what comes before `marker`, and it. Raises NotACall without one."""
        skipped: list[str] = []
        while not (yield from self.literal(marker)):
            char = yield from self.peek()
            if not char:
                raise NotACall
            skipped.append(char)
            self._at += 1
        return "".join(skipped)

    def string(self) -> Steps[str]:
        """A JSON string. Raises NotACall."""
        if (yield from self.peek()) != '"':
            raise NotACall
        written = yield from self.value()
        try:
            return str(msgspec.json.decode(written))
        except msgspec.DecodeError as error:  # half of a surrogate pair
            raise NotACall from error

    def value(self) -> Steps[str]:
        """A JSON value, as it is written. Raises NotACall."""
        pieces: list[str] = []
        if not (yield from self._json(pieces.append)):
            raise NotACall
        return "".join(pieces)

    def _json(self, show: Callable[[str], None]) -> Steps[bool]:
        """Whether a whole value came; as much of one as did is shown, and read."""
        value = JsonText()
        while not (value.is_complete or value.is_broken) and (yield from self.peek()):
            end = value.take(self._text, self._at)
            if end > self._at:
                show(self._text[self._at : end])
            self._at = end
        return value.is_complete

    # ---- content and reasoning

    def pass_on(self, marker: str = "", kind: Shown = ContentDelta) -> Steps[bool]:
        """Show what comes before `marker`, and stop there: True. False at the end. White space at
        the end of what was shown is held back."""
        while True:
            found = self._text.find(marker, self._at) if marker else -1
            if found >= 0:
                self._show(kind, self._text[self._at : found])
                self._at = found
                return True
            sure = len(self._text) - (0 if self._ended else self._begun(marker))
            self._show(kind, self._text[self._at : sure])
            self._at = sure
            if self._ended:
                return False
            yield

    def _begun(self, marker: str) -> int:
        """How many of the last characters may be the beginning of `marker`."""
        text = self._text
        start = max(self._at, len(text) - len(marker) + 1)
        return next(
            (len(text) - at for at in range(start, len(text)) if marker.startswith(text[at:])), 0
        )

    def show_content(self, text: str) -> None:
        self._show(ContentDelta, text)

    def show_white(self, kind: Shown = ContentDelta) -> None:
        """Treat what was held back as text after all."""
        if self._white:
            self._add(kind(self._white))
        self._white = ""

    def drop_white(self) -> None:
        """Treat what was held back as part of the format."""
        self._white = ""

    def _show(self, kind: Shown, text: str) -> None:
        if not text:
            return
        text = self._white + text
        sure = max(len(text.rstrip(WHITE)), len(text) - MAX_WHITE_CHARS)
        self._white = text[sure:]
        if sure:
            self._add(kind(text[:sure]))

    def _add(self, delta: Delta) -> None:
        """A delta of the kind of the last one goes on with it."""
        last = self._deltas[-1] if self._deltas else None
        if isinstance(delta, ToolCallStart) or type(last) is not type(delta):
            self._deltas.append(delta)
        else:
            assert last is not None and not isinstance(last, ToolCallStart)
            self._deltas[-1] = msgspec.structs.replace(delta, text=last.text + delta.text)

    # ---- calls

    def attempt(self, call: Steps[None], opening: int = 0) -> Steps[bool]:
        """Read what `call` reads. Where it raises NotACall before a call has begun nothing is read,
        but for the `opening` first characters, which are content then; where it does so within
        one, what was read stands."""
        assert self._tried_from is None, "tries do not nest"
        self._tried_from = self._at
        try:
            yield from call
        except NotACall:
            if self._tried_from is not None:
                self._at = self._tried_from + opening
                self.show_content(self._text[self._tried_from : self._at])
            return False
        finally:
            self._tried_from = None
        return True

    def call(self, name: str, arguments: str | None = None) -> Steps[None]:
        """A call begins: of `name`, with the JSON object that comes, or with `arguments`, which was
        read before. Raises NotACall for a name that is not offered, for one call too many, and
        where the arguments are no object or not whole."""
        opening = arguments[:1] if arguments is not None else (yield from self.peek())
        if opening != "{" or name not in self._tools or self.num_calls >= self._max_calls:
            raise NotACall
        self._tried_from = None
        self.drop_white()
        index = self.num_calls
        self.num_calls += 1
        self._add(ToolCallStart(index, name))
        if arguments is not None:
            self._add(ArgumentsDelta(index, arguments))
            return
        self.is_whole = False
        self.is_whole = yield from self._json(lambda text: self._add(ArgumentsDelta(index, text)))
        if not self.is_whole:
            raise NotACall

    def closing(self, expected: str) -> Steps[bool]:
        """Read `expected`, which the format puts behind a call, and white space before it; also
        where the text ends within it."""
        white = yield from self.skip()
        if (yield from self.literal(expected)):
            return True
        if self._ended and expected.startswith(self._text[self._at :]):
            self._at = len(self._text)
            return True
        self.show_content(white)
        return False
