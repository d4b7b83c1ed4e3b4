"""Token ids of one choice to text, as they come: whole characters only, cut at stop strings.

Knows no model and no wire format.

Two stages:

1. `_Decoder` turns ids into text at constant cost per token. It decodes a short window of the
   newest ids, as Hugging Face's text-generation-inference and vLLM do: ids before `start` are
   forgotten, those up to `read` are sure and stay as context (a decoder treats the first token of
   a text in its own way), those behind may still be part of a character, which shows as U+FFFD at
   the end. What is emitted never ends in such a U+FFFD until it is known to be one. A byte-level
   token of whole characters says the same wherever it stands, and is looked up.
2. `_StopString` is the automaton of Knuth, Morris and Pratt (1977) over characters, one per stop
   string. Its state says how many of the last characters may be the beginning of the string:
   exactly those are held back. The stop string that is completed first wins; of two completed
   by one character, the longer one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from engine.text.tokenizer import UNDECODED, Tokenizer

MAX_HELD_TOKENS = 16
"""Tokens that wait for the end of a character. A character has at most 4 bytes and a token at
least one, so more than that are bytes that never were text."""

_UTF8_BYTES = 4
_CONTEXT_TOKENS = 8
"""At most so many tokens of a prompt are context: more than a character has."""


class Piece(NamedTuple):
    """The text that one `push` gave."""

    text: str
    stopped: bool
    """A stop string is complete; the text ended before it (or with it)."""
    num_tokens_used: int
    """The number of pushed ids up to the one that completed the stop string; all if none did."""


class Detokenizer:
    """`stop`: non-empty strings. `include_stop`: the text ends with the stop string, not before.

    However the ids are cut into pushes, the texts and the final `flush` concatenate to the same:
    to `Tokenizer.decode` of all ids, up to the stop string; or, where they go on with others
    (`before`), to what they add to the text of those. Where ids are no valid UTF-8 that
    holds for byte-level tokenizers; byte fallback (Llama 2) may show another number of U+FFFD.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        *,
        skip_special_tokens: bool = True,
        shown: Collection[int] = (),
        before: Sequence[int] = (),
    ) -> None:
        """`shown`: special tokens that are not skipped, such as an output format's markers.
        `before`: the ids of a text that is gone on with. A SentencePiece decoder drops the space
        that a text begins with, and this one does not begin here."""
        assert all(stop), "an empty stop string"
        skipped = tokenizer.special_ids.difference(shown) if skip_special_tokens else frozenset()
        self._decoder = _Decoder(tokenizer, skipped, before)
        self._stops = [_StopString(string) for string in stop]
        self._include_stop = include_stop
        self._held = ""
        self.stopped = False
        self.stop_string: str | None = None
        """The one that is complete."""

    def push(self, token_ids: Iterable[int]) -> Piece:
        """Text that is sure now. After a stop nothing comes and nothing is used."""
        texts: list[str] = []
        num_used = 0
        for token_id in token_ids:
            if self.stopped:
                break
            num_used += 1
            texts.append(self._match(self._decoder.push(token_id)))
        return Piece("".join(texts), self.stopped, num_used)

    def flush(self) -> str:
        """The rest, once no more ids come: what was held back, an unfinished character as U+FFFD.
        It may still complete a stop string, see `stopped`."""
        if self.stopped:
            return ""
        text = self._match(self._decoder.flush())
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _match(self, delta: str) -> str:
        """Return of the held text and `delta`: what is before a stop string, and cannot become part
        of one.
        """
        text = self._held + delta
        if not self._stops:
            return text
        for end, character in enumerate(delta, start=len(self._held) + 1):
            completed = [s.string for s in self._stops if s.feed(character)]
            if completed:
                self.stopped, self._held = True, ""
                self.stop_string = max(completed, key=len)
                return text[: end if self._include_stop else end - len(self.stop_string)]
        sure = len(text) - max(stop.matched for stop in self._stops)
        self._held = text[sure:]
        return text[:sure]


class _StopString:
    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0
        """Length of the longest beginning of `string` that the text ends with."""
        self._shorter = [0] * (len(string) + 1)
        """By that length: the next shorter beginning that the text ends with as well."""
        length = 0
        for position in range(1, len(string)):
            length = self._extend(length, string[position])
            self._shorter[position + 1] = length

    def feed(self, character: str) -> bool:
        """True when `character` completes the string; not to be fed after that."""
        self.matched = self._extend(self.matched, character)
        return self.matched == len(self.string)

    def _extend(self, length: int, character: str) -> int:
        while length and self.string[length] != character:
            length = self._shorter[length]
        return length + 1 if self.string[length] == character else 0


class _Decoder:
    def __init__(
        self, tokenizer: Tokenizer, skipped: frozenset[int], before: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._ids = self._end_of(before)
        self._read = len(self._ids)
        """Ids before this one are decoded for good; they are context for the next."""
        self._emitted = len(self._decode(self._ids)) if self._ids else 0
        """Characters of the window's text that were returned."""

    def _end_of(self, before: Sequence[int]) -> list[int]:
        """Return the fewest of the last ids that are whole characters; none where all that are
        looked at end within one."""
        shown = [each for each in before[-_CONTEXT_TOKENS:] if each not in self._skipped]
        for start in range(len(shown) - 1, -1, -1):
            if UNDECODED not in self._decode(shown[start:]):
                return shown[start:]
        return []

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if self._read == len(self._ids) and (text := self._tokenizer.whole_text(token_id)):
            # Nothing waits for the end of a character, and this one needs no context.
            self._ids, self._read, self._emitted = [token_id], 1, len(text)
            return text
        self._ids.append(token_id)
        text = self._decode(self._ids)
        sure = text.rstrip(UNDECODED)
        delta = sure[self._emitted :]
        self._emitted = max(self._emitted, len(sure))
        if len(sure) == len(text) and delta:
            # All of it is text: the window moves on, with what is new as its context.
            self._ids = self._ids[self._read :]
            self._read = len(self._ids)
            self._emitted = len(self._decode(self._ids))
        elif len(self._ids) - self._read > MAX_HELD_TOKENS:
            delta += self._give_up()
        return delta

    def flush(self) -> str:
        delta = self._decode(self._ids)[self._emitted :]
        self._ids, self._read, self._emitted = [], 0, 0
        return delta

    def _give_up(self) -> str:
        """Too much is held, so it is no text: return it, but for the end of the window, where a
        character may have begun.

        The cut must not go through a character. One that did would end within 3 bytes, that is
        within 3 tokens, and so be seen whole in the window but not in its halves. Of any 4
        neighbouring cuts, one goes through none.
        """
        whole = self._decode(self._ids)
        newest = len(self._ids) - _UTF8_BYTES
        for cut in range(newest, newest - _UTF8_BYTES, -1):
            before = self._decode(self._ids[:cut])
            if before + self._decode(self._ids[cut:]) == whole:
                break
        delta = before[self._emitted :]
        # Counted in the new window. Its text may have been returned in part, up to its last U+FFFD.
        self._emitted = max(self._emitted - len(before), 0)
        self._ids = self._ids[cut:]
        self._read = 0
        return delta

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
