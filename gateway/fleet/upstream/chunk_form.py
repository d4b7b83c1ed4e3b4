"""Reads chunks that differ from the one before in nothing but the text that the model wrote: nearly
all of a stream.

Pure: bytes in, bytes out; it knows JSON's strings and no more. One chunk is parsed; of those behind
it that have its form only the texts are looked at, as many at a time as a read has brought.
Whatever is not surely of the same form is left to the parser.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from foundation.sse import BETWEEN, DATA, END

SEPARATOR = b"\x00"
"""Between texts, while they are looked at: no JSON string holds it unescaped."""

_plain = re.compile(
    rb'(?:[^"\\\x01-\x1f]++|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}))*+'
).match
"""Match the inside of one or several JSON strings. It may still be invalid UTF-8."""


class ChunkRun(NamedTuple):
    texts: list[bytes]
    size_bytes: int
    """The size in the stream."""

    def first(self, number: int) -> ChunkRun:
        """Return the first chunks of them. All have the same frame around their texts."""
        texts = self.texts[:number]
        frame = (self.size_bytes - sum(map(len, self.texts))) // len(self.texts)
        return ChunkRun(texts, sum(map(len, texts)) + number * frame)


class ChunkForm(msgspec.Struct, frozen=True):
    """A chunk around its text, the quotes included, as it came and as it is shown."""

    before: bytes
    after: bytes
    sent_before: bytes
    sent_after: bytes

    @classmethod
    def of(cls, data: bytes, quoted: bytes, sent: bytes) -> ChunkForm | None:
        """Return the form of a chunk. `quoted`: the text in the chunk `data`, which is shown as
        `sent`. None: nobody can say where it stands, or an event would have several lines."""
        if data.count(quoted) != 1 or sent.count(quoted) != 1 or b"\n" in data or b"\n" in sent:
            return None
        before, _, after = data.partition(quoted)
        sent_before, _, sent_after = sent.partition(quoted)
        return cls(before + b'"', b'"' + after, sent_before + b'"', b'"' + sent_after)

    def take(self, stream: bytes) -> ChunkRun | None:
        """Return what `stream`, which begins with an event, begins with. None: another form."""
        begin = len(DATA) + len(self.before)
        if not stream.startswith(self.before, len(DATA)) or not stream.startswith(DATA):
            return None
        end = stream.rfind(self.after + END)
        if end < begin:
            return None
        texts = stream[begin:end].split(self.after + BETWEEN + self.before)
        num_good = count_plain(texts)
        if not num_good:
            return None
        if num_good < len(texts):
            del texts[num_good:]
        frame = begin + len(self.after) + len(END)
        return ChunkRun(texts, sum(map(len, texts)) + num_good * frame)


def count_plain(texts: list[bytes]) -> int:
    """Count how many from the first on are the content of a JSON string beyond doubt."""
    joined = SEPARATOR.join(texts)
    found = _plain(joined)
    assert found is not None  # it takes nothing, too
    good = found[0]
    if not good.isascii():
        try:
            good.decode()
        except UnicodeDecodeError as error:
            good = good[: error.start]
    if len(good) == len(joined):
        whole = len(texts)
    else:
        whole = good.count(SEPARATOR)  # the one that it ends in is not whole
    separators = joined.count(SEPARATOR)
    if separators == len(texts) - 1:
        return whole
    # A text holds one itself: which ones do?
    return min(whole, next(at for at, text in enumerate(texts) if SEPARATOR in text))
