"""Reads the lines of a batch's input, and finds what is wrong with them. Pure. Bytes come in pieces
of any size; a line is known by its number in the file, from 1. Only what each line says of itself
is checked here: whether a model takes its body turns out when it runs, and then the line alone
fails."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.wire.anthropic import batched_requests
from gateway.wire.openai.batches import WrittenLine

MAX_ERRORS = 100
"""At most this many errors are listed; a file with so many is read no further."""
_OBJECT = b"{"


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """An error of a line, in the shape of OpenAI's SDK."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Line(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    custom_id: str
    body: bytes
    model: str


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[str, Meta(min_length=1)]
    stream: Any = None


_line_decoder = msgspec.json.Decoder(WrittenLine)
_body_decoder = msgspec.json.Decoder(_Body)


class TooLong(Exception):
    """A line is too long; it is not kept in memory to be named in full."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


async def split(
    pieces: AsyncIterator[bytes], *, max_line_bytes: int
) -> AsyncIterator[tuple[int, bytes]]:
    """Split pieces into lines that are not blank, with their numbers. Raises: TooLong."""
    number, rest = 0, b""
    async for piece in without_mark(pieces):
        first, *others = piece.split(b"\n")
        rest += first
        for following in others:
            number += 1
            if rest.strip():
                yield number, rest
            rest = following
        if len(rest) > max_line_bytes:
            raise TooLong(number + 1)
    if rest.strip():
        yield number + 1, rest


async def without_mark(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Drop the byte order mark with which editors on Windows begin a file."""
    begun: bytes | None = b""
    async for piece in pieces:
        if begun is None:
            yield piece
            continue
        begun += piece
        if len(begun) >= len(BOM_UTF8):
            yield begun.removeprefix(BOM_UTF8)
            begun = None
    if begun:
        yield begun


class LinesReader:
    """A reader of one input; it remembers which ids were there. `serves`: whether a model may be
    asked."""

    def __init__(self, endpoint: str, serves: Callable[[str], bool], *, max_lines: int) -> None:
        self._endpoint, self._serves, self._max_lines = endpoint, serves, max_lines
        self._first_of: dict[str, int] = {}
        self._models: set[str] = set()
        self.errors: list[LineError] = []
        self._is_full = False

    @property
    def num_lines(self) -> int:
        """Return the number of good lines."""
        return len(self._first_of)

    @property
    def model(self) -> str | None:
        """Return the one model of all lines; None: they ask for several."""
        return next(iter(self._models)) if len(self._models) == 1 else None

    @property
    def has_given_up(self) -> bool:
        return self._is_full or len(self.errors) >= MAX_ERRORS

    def read(self, number: int, text: bytes) -> Line | None:
        """Read a line; None: an error says why not."""
        found = self._read(number, text)
        if isinstance(found, LineError):
            self.errors.append(found)
            return None
        self._first_of[found.custom_id] = number
        self._models.add(found.model)
        return found

    def end(self) -> None:
        if not self._first_of and not self.errors:
            self.errors.append(LineError(code="empty_file", message="The input file is empty."))

    def refuse_long(self, number: int, max_line_bytes: int) -> None:
        message = f"This line is longer than {max_line_bytes} bytes."
        self.errors.append(LineError(code="line_too_long", message=message, line=number))

    def _read(self, number: int, text: bytes) -> Line | LineError:
        if self.num_lines >= self._max_lines:
            self._is_full = True
            message = f"A batch has at most {self._max_lines} requests."
            return LineError(code="too_many_requests", message=message, line=number)
        try:
            written = _line_decoder.decode(text)
        except msgspec.ValidationError as error:
            return _invalid(number, str(error))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            message = "This line is not parseable as valid JSON."
            return LineError(code="invalid_json_line", message=message, line=number)
        return self._check(number, written)

    def _check(self, number: int, written: WrittenLine) -> Line | LineError:
        def wrong(code: str, message: str, param: str) -> LineError:
            return LineError(code=code, message=message, param=param, line=number)

        if "\0" in written.custom_id:
            return wrong("invalid_custom_id", "A custom_id has no NUL.", "custom_id")
        if written.method != "POST":
            return wrong("invalid_method", "The method of a request must be POST.", "method")
        if written.url != self._endpoint:
            message = f"The URL of a request must be the batch's endpoint, {self._endpoint}."
            return wrong("invalid_url", message, "url")
        known = self._first_of.get(written.custom_id)
        if known is not None:
            message = f"The custom_id of this line is that of line {known}."
            return wrong("duplicate_custom_id", message, "custom_id")
        body = bytes(written.body)
        if not body.lstrip().startswith(_OBJECT):
            return wrong("invalid_request", "The body of a request must be an object.", "body")
        try:
            said = _body_decoder.decode(body)
        except msgspec.ValidationError as error:
            return _invalid(number, str(error), "body")
        if said.stream not in (None, False):
            message = "The answers of a batch are not streamed."
            return wrong("invalid_request", message, "body.stream")
        if not self._serves(said.model):
            message = f"The model {said.model[:128]!r} does not exist or you may not use it."
            return wrong("model_not_found", message, "body.model")
        return Line(number=number, custom_id=written.custom_id, body=body, model=said.model)


class RequestsReader:
    """A reader of the requests of a batch in Anthropic's shape, which were checked when they came,
    one to a line: what is wrong with their parameters turns out when they run."""

    model: str | None = None

    def __init__(self) -> None:
        self.num_lines = 0
        self.errors: list[LineError] = []

    @property
    def has_given_up(self) -> bool:
        return bool(self.errors)

    def read(self, number: int, text: bytes) -> Line:
        found = batched_requests.decoder.decode(text)
        self.num_lines += 1
        body = bytes(found.params)
        return Line(number=number, custom_id=found.custom_id, body=body, model="")

    def end(self) -> None:
        """End the input; it has at least one request."""

    def refuse_long(self, number: int, max_line_bytes: int) -> None:
        message = f"This request is longer than {max_line_bytes} bytes."
        self.errors.append(LineError(code="line_too_long", message=message, line=number))


def _invalid(number: int, text: str, inside: str = "") -> LineError:
    """Make an error of msgspec's own words, which name the field."""
    reason, _, where = text.partition(" - at `$")
    param = f"{inside}{where.rstrip('`')}".lstrip(".") or None
    if "missing required field" in text:
        field = text.split("`")[1]
        code, param = "missing_required_parameter", f"{inside}.{field}".lstrip(".")
        return LineError(
            code=code, message=f"Missing required parameter: '{param}'.", param=param, line=number
        )
    return LineError(code="invalid_request", message=f"{reason}.", param=param, line=number)
