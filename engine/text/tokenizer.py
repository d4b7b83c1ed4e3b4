"""Text to token ids and back: a Hugging Face folder's `tokenizer.json`, run by `tokenizers`.

Knows no model, no torch, no transformers. Calls hold no lock and release the GIL, so they may run
in worker threads.

A rendered chat is one string, and special tokens in it are parsed wherever they stand: a user who
writes `<|im_end|>` ends the turn, as with transformers' and vLLM's defaults. What a user can reach
that way is the own conversation only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from engine.errors import ConfigError, InvalidRequest

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
"""Those that `tokenizer_config.json` may name and a chat template may use."""

CONFIG_FACTS: Mapping[str, type] = {
    "tokenizer_class": str,
    "model_max_length": int,
    "add_bos_token": bool,
    "add_eos_token": bool,
    "add_prefix_space": bool,
    "clean_up_tokenization_spaces": bool,
    "split_special_tokens": bool,
}
"""The fields of `tokenizer_config.json` that tell a client how texts are tokenized."""

UNDECODED = "\N{REPLACEMENT CHARACTER}"

MAX_COMPOSED = 4
"""Characters that Unicode's canonical composition (UAX 15) may make one of."""

CHARS_PER_TOKEN = 128
"""No text that a person wrote has as many: a word of WordPiece has at most 100 characters."""

_LONE_BYTE = re.compile("<0x[0-9A-F]{2}>")


def _bytes_of_letters() -> dict[str, bytes]:
    """GPT-2's `bytes_to_unicode`, backwards: printable Latin-1 stands for itself, the other bytes
    are the letters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    letters |= {chr(0x100 + position): byte for position, byte in enumerate(others)}
    return {letter: bytes([byte]) for letter, byte in letters.items()}


_BYTES_OF = _bytes_of_letters()


SHORT_CHARS = 2048
"""Well under a millisecond of work."""


class Tokenizer:
    """`special_tokens`: name ("bos_token", ...) to text. `special_ids`: every id that `decode`
    leaves out by default."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str],
        config: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """`config`: the folder's `tokenizer_config.json`."""
        # Some folders were saved with their training's truncation and padding switched on, which
        # would shorten a long prompt without a word.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = special_tokens
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._facts = {
            name: config[name]
            for name, kind in CONFIG_FACTS.items()
            if isinstance(config.get(name), kind)
        }
        self._added = {id_: str(token.content) for id_, token in added.items()}
        self.added_ids = frozenset(self._added)
        """Every id that stands for a text as a whole, whatever is around it."""
        decoder = b"{}" if backend.decoder is None else backend.decoder.__getstate__()
        self._byte_level = b'"ByteLevel"' in decoder
        self._joins_bytes = json.loads(decoder).get("type") == "ByteLevel"
        """A text is the bytes of its tokens, one after the other, and nothing else."""
        self._whole_texts: dict[int, str] = {}

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Raises `ConfigError` when the folder has no usable `tokenizer.json`."""
        path = folder / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error
        config = read_tokenizer_config(folder)
        return cls(backend, special_tokens(config), config)

    @property
    def vocab_size(self) -> int:
        """Ids in use, added tokens included; a model's logits may have more rows."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    def token_to_id(self, token: str) -> int | None:
        id_: int | None = self._backend.token_to_id(token)
        return id_

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`; special tokens in it are parsed. `add_special_tokens` puts BOS (and what
        else the folder's post-processor adds) around it: for plain completions, never for a
        rendered chat, whose template wrote its own. Raises `InvalidRequest` for lone surrogates,
        which are no text."""
        ids: list[int] = self._encoding(text, add_special_tokens, with_ends=False).ids
        return ids

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Ids of a rendered chat, and where in it, in characters, each of them ends. Raises as
        `encode`."""
        encoding = self._encoding(text, False, with_ends=True)
        return encoding.ids, [end for _, end in encoding.offsets]

    def _encoding(
        self, text: str, add_special_tokens: bool, *, with_ends: bool
    ) -> tokenizers.Encoding:
        """Encode a text; a long one without the interpreter's lock, which `encode` holds until it
        is done: a second for a megabyte."""
        try:
            if len(text) <= SHORT_CHARS:
                return self._backend.encode(text, add_special_tokens=add_special_tokens)
            backend = self._backend
            encode_all = backend.encode_batch if with_ends else backend.encode_batch_fast
            return encode_all([text], add_special_tokens=add_special_tokens)[0]
        except TypeError as error:  # what `tokenizers` makes of a str that UTF-8 cannot hold
            raise InvalidRequest("the text holds a lone surrogate") from error

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, ids out of range vanish."""
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def whole_text(self, token_id: int) -> str:
        """Return what one id adds to any text that ends with a whole character; empty where that
        depends on its neighbours, as where it is a part of a character."""
        text = self._whole_texts.get(token_id)
        if text is None:
            text = self.decode([token_id], skip_special_tokens=False) if self._joins_bytes else ""
            text = self._whole_texts[token_id] = "" if UNDECODED in text else text
        return text

    def pieces(self, token_ids: Iterable[int]) -> list[str]:
        """Return tokens as the vocabulary writes them (`Ġthe`); "" for an id out of range."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def describe(self) -> dict[str, Any]:
        """Return what `tokenizer_config.json` would say: facts, special tokens, added tokens."""
        added = self._backend.get_added_tokens_decoder()
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self._facts,
            **self.special_tokens,
            "additional_special_tokens": [
                str(token.content)
                for _, token in sorted(added.items())
                if token.special and token.content not in self.special_tokens.values()
            ],
            "added_tokens_decoder": {
                str(token_id): {
                    "content": str(token.content),
                    "lstrip": token.lstrip,
                    "normalized": token.normalized,
                    "rstrip": token.rstrip,
                    "single_word": token.single_word,
                    "special": token.special,
                }
                for token_id, token in sorted(added.items())
            },
        }

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one id stands for, also where that is no whole character; nothing if out of
        range.

        Byte-level vocabularies write each byte as a character (GPT-2), SentencePiece's a space as
        U+2581 and a lone byte as `<0xNN>`.
        """
        if token_id in self._added:
            return self._added[token_id].encode()
        piece: str | None = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            return b"".join(_BYTES_OF.get(letter) or letter.encode() for letter in piece)
        if _LONE_BYTE.fullmatch(piece):
            return bytes.fromhex(piece[3:5])
        return piece.replace("\u2581", " ").encode()

    @cached_property
    def _longest_token_bytes(self) -> int:
        ids = self._backend.get_vocab(with_added_tokens=True).values()
        return max((len(self.token_bytes(token_id)) for token_id in ids), default=1)

    @cached_property
    def _takes_space(self) -> bool:
        added = self._backend.get_added_tokens_decoder().values()
        return any(token.lstrip or token.rstrip for token in added)

    def fewest_tokens(self, num_chars: int) -> int:
        """How many tokens a text of so many characters has at least, without looking at it.

        A byte-level token stands for no more than its own bytes, and a normalizer (NFC) makes one
        character of at most `MAX_COMPOSED`. Others may fuse what they do not know, or take all
        space around a token: 0 for those.
        """
        if not self._byte_level or self._takes_space:
            return 0
        composed = 1 if self._backend.normalizer is None else MAX_COMPOSED
        return num_chars // (self._longest_token_bytes * composed)

    @cached_property
    def _ascii_spans(self) -> list[tuple[int, bytes]]:
        """By a length in bytes, the ASCII characters of which no token that has one is longer."""
        longest = dict.fromkeys(range(128), 1)
        for token_id in self._backend.get_vocab(with_added_tokens=True).values():
            written = self.token_bytes(token_id)
            for byte in longest.keys() & set(written):
                longest[byte] = max(longest[byte], len(written))
        if self._takes_space:
            longest = {byte: span for byte, span in longest.items() if byte > 32}
        spans: dict[int, list[int]] = {}
        for byte, length in longest.items():
            spans.setdefault(1 << (length - 1).bit_length(), []).append(byte)
        return [(length, bytes(found)) for length, found in spans.items()]

    def fewest_tokens_in(self, text: str) -> int:
        """Return how many tokens a text has at least, in a hundredth of the time of `encode`.

        A token with a character in it is no longer than the longest one that has it, so each
        character is at least that part of a token. NFC changes ASCII only beside other characters.
        Of vocabularies that may fuse what they do not know it is a rule, not a bound:
        `CHARS_PER_TOKEN`.
        """
        if not self._byte_level:
            return len(text) // CHARS_PER_TOKEN
        fewest = self.fewest_tokens(len(text))
        normalizer = self._backend.normalizer
        if normalizer is not None and type(normalizer).__name__ != "NFC":
            return fewest
        ascii_text = text.encode("ascii", errors="ignore")
        tokens = 0.0
        for length, characters in self._ascii_spans:
            tokens += (len(ascii_text) - len(ascii_text.translate(None, characters))) / length
        if normalizer is not None:
            tokens -= len(text) - len(ascii_text)
        return max(fewest, int(tokens))

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_to_id(token)


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json`; empty where there is none. Raises `ConfigError` for broken JSON."""
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return config


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The named special tokens of a `tokenizer_config.json`, where a token is its text or a
    serialized `AddedToken` ({"content": text, ...})."""
    found = {}
    for name in SPECIAL_TOKENS:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found
