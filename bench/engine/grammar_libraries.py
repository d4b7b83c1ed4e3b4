"""Two libraries that say what a JSON schema lets a model say next, behind the calls that the engine
makes: llguidance, which it uses, and xgrammar, where it is installed.

A vocabulary is a tokenizer.json.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import random
from collections.abc import Sequence as Rows
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.protocol import Grammar
from engine.runner.grammar.constraint import (
    GrammarConstraint,
    MatcherTokenizer,
    Vocabulary,
    compile_grammar,
)
from engine.sequence import Constraint
from engine.text.tokenizer import Tokenizer

PENNY = Path(__file__).resolve().parents[2] / "models" / "penny"
EOS = (2, 0)


def grown_vocabulary(folder: Path, size: int, *, seed: int = 1) -> Path:
    """penny's tokenizer.json, grown to `size` by merges of tokens that it has: as many strings of
    bytes to look at as a large model's, if no language's."""
    tokenizer = json.loads((PENNY / "tokenizer.json").read_bytes())
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    draw = random.Random(seed)
    pieces = list(vocab)
    taken = len(vocab) + sum(each["content"] not in vocab for each in tokenizer["added_tokens"])
    while taken < size:
        left, right = draw.choice(pieces), draw.choice(pieces)
        if left + right not in vocab and len(left + right) <= 24:
            vocab[left + right] = taken
            merges.append([left, right])
            taken += 1
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(tokenizer))
    return path


class Library(Protocol):
    name: str

    def compile(self, schema: str) -> Constraint:
        """Cold: nothing is remembered of other schemas."""

    def num_forced(self, schema: str, text: str) -> int:
        """Count the characters of a text that fits whose successor the schema alone decides."""


class LLGuidance:
    def __init__(self, path: Path) -> None:
        self.name = f"llguidance {importlib.metadata.version('llguidance')}"
        self._encode = Tokenizer.load(path.parent)
        self._tokenizer = MatcherTokenizer(
            Vocabulary(str(path), self._encode.vocab_size, EOS),
        )

    def compile(self, schema: str) -> Constraint:
        matcher = compile_grammar(Grammar(kind="json_schema", text=schema), self._tokenizer)
        return GrammarConstraint(matcher, after_token_id=None, stop_token_ids=(), unused_id=None)

    def num_forced(self, schema: str, text: str) -> int:
        matcher = compile_grammar(Grammar(kind="json_schema", text=schema), self._tokenizer)
        num_forced, left = 0, self._encode.encode(text)
        while left:
            forced = matcher.compute_ff_tokens()
            if forced and forced == left[: len(forced)]:
                num_forced += len(self._encode.decode(forced))
                matcher.consume_tokens(forced)
                left = left[len(forced) :]
            else:
                matcher.consume_token(left.pop(0))
        return num_forced


class XGrammar:
    """As `Constraint`: shown what was said, asked for masks."""

    def __init__(self, path: Path) -> None:
        import xgrammar

        self.name = f"xgrammar {importlib.metadata.version('xgrammar')}"
        self._library: Any = xgrammar
        tokenizer = json.loads(path.read_bytes())
        ids = dict(tokenizer["model"]["vocab"])
        ids |= {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
        texts = [""] * (max(ids.values()) + 1)
        for text, token_id in ids.items():
            texts[token_id] = text
        info = xgrammar.TokenizerInfo(
            texts, vocab_type=xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=list(EOS)
        )
        self._encode = Tokenizer.load(path.parent)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: str) -> Constraint:
        return XGrammarConstraint(
            self._library.GrammarMatcher(self._compiler.compile_json_schema(schema))
        )

    def num_forced(self, schema: str, text: str) -> int:
        matcher = self._library.GrammarMatcher(self._compiler.compile_json_schema(schema))
        num_forced = 0
        while text:
            forced = matcher.find_jump_forward_string()
            if forced and text.startswith(forced):
                num_forced += len(forced)
            else:
                forced = text[0]
            matcher.accept_string(forced)
            text = text[len(forced) :]
        return num_forced


class XGrammarConstraint:
    gave_up = False

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._num_seen = 0

    def copy(self) -> XGrammarConstraint:
        return XGrammarConstraint(self._matcher.fork())

    def is_over(self, said: list[int]) -> bool:
        for token_id in said[self._num_seen :]:
            self._matcher.accept_token(token_id)
        self._num_seen = len(said)
        return bool(self._matcher.is_terminated())

    def forced(self, said: list[int]) -> list[int]:
        return []

    def allow(self, said: list[int], drafts: list[int], mask: NDArray[np.int32]) -> None:
        assert not drafts, "measured without guesses"
        if not self.is_over(said):
            self._matcher.fill_next_token_bitmask(torch.from_numpy(mask[None]), 0)

    @staticmethod
    def allow_all(
        asked: Rows[tuple[int, XGrammarConstraint, list[int], list[int]]], masks: NDArray[np.int32]
    ) -> None:
        for index, constraint, said, drafts in asked:
            constraint.allow(said, drafts, masks[index])


def libraries(path: Path) -> list[Library]:
    found: list[Library] = [LLGuidance(path)]
    if importlib.util.find_spec("xgrammar") is not None:
        found.append(XGrammar(path))
    return found


class Grammars:
    """In place of the engine's compiler: each request is kept to a schema that was compiled before
    anything is timed."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._ready: dict[str, Constraint] = {}

    def prepare(self, request_id: str, grammar: Grammar) -> None:
        if request_id not in self._ready:
            self._ready[request_id] = self._library.compile(grammar.text)

    def forget(self, request_id: str) -> None:
        self._ready.pop(request_id, None)

    def constraint(self, request_id: str, grammar: Grammar, stop_token_ids: object) -> Constraint:
        return self._ready.pop(request_id)
