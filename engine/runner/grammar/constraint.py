"""Computes what a grammar lets a choice say next: llguidance's matchers, shown what was said.

Knows no queue, no batch and no torch.

A guess is looked at on a copy of the matcher, so that one which was wrong leaves no trace. A
matcher that gave up, because the grammar grew beyond its limits, allows nothing: its request ends
with an error. The library itself would allow EOS then, as if the output were complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence as Rows
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from engine.errors import InvalidRequest
from engine.protocol import Grammar
from engine.text.output_parser.grammars.ebnf import ebnf_to_lark
from engine.text.output_parser.grammars.lark import JSON_WHITESPACE

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # a compilation: tens of milliseconds
    step_lexer_fuel=200_000,  # a mask: some 15 ms
    step_max_items=50_000,  # a mask: some 3 ms
    max_items_in_row=2_000,
    max_lexer_states=50_000,  # some 100 MB of a matcher
    max_grammar_size=100_000,
    verbose_errors=False,  # they would quote the request
)
MAX_MESSAGE_CHARS = 200
"""The bound on the library's message about a grammar."""
NOTHING_ALLOWED = "NoExtensionBias"
"""llguidance's name for a grammar that no text can begin."""
UNSATISFIABLE = "no text is of it: what it begins with is itself, or excluded"
END_OF_GRAMMAR = "<|end of grammar|>"
"""Stands in for EOS where a model has none. Never allowed."""


class Vocabulary(msgspec.Struct, frozen=True):
    """The vocabulary that masks are over."""

    tokenizer_path: str
    """The model's tokenizer.json."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class MatcherTokenizer:
    """The library's view of a vocabulary, which it reads from tokenizer.json by itself."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """InvalidRequest, of the grammar it is wanted for, where there is none that can be used."""
        size, eos_token_ids = vocabulary.vocab_size, list(vocabulary.eos_token_ids)
        self.unused_id: int | None = None
        """Bit of a mask that means nothing."""
        try:
            text = Path(vocabulary.tokenizer_path).read_text(encoding="utf-8")
            if not eos_token_ids:
                text, self.unused_id = _with_end_of_grammar(text)
                eos_token_ids = [self.unused_id]
                size = max(size, self.unused_id + 1)
            self.tokenizer = LLTokenizer(text, n_vocab=size, eos_token=eos_token_ids)
        # The last three: JSON of another shape.
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise InvalidRequest(
                f"grammar cannot be kept to: the model has no usable tokenizer.json ({error})"[
                    :MAX_MESSAGE_CHARS
                ],
                param="grammar",
            ) from error


def _with_end_of_grammar(text: str) -> tuple[str, int]:
    """A tokenizer.json with one more token, behind all others; and its id."""
    tokenizer = json.loads(text)
    ids = [token["id"] for token in tokenizer["added_tokens"]]
    vocab = tokenizer["model"]["vocab"]
    ids += vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    token = {"id": max(ids) + 1, "content": END_OF_GRAMMAR, "special": True} | flags
    tokenizer["added_tokens"].append(token)
    return json.dumps(tokenizer), max(ids) + 1


def compile_grammar(grammar: Grammar, tokenizer: MatcherTokenizer) -> LLMatcher:
    """A matcher that has seen nothing. InvalidRequest where there is none within the limits, or
    where it allows nothing to begin with.

    Not bounded in time: whether an intersection of regular expressions (`&`, `~`, two patterns for
    one string) is empty is decided first, which takes exponentially long. See `grammar_trial.py`.
    """
    try:
        text = _library_grammar(grammar)
    except ValueError as error:
        raise _refusal(str(error)) from error
    matcher = LLMatcher(tokenizer.tokenizer, text, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        _compute_mask(matcher, _mask(tokenizer.tokenizer.vocab_size))
    if matcher.is_error():
        said = matcher.get_error().partition("\n")[0]
        raise _refusal(UNSATISFIABLE if said == NOTHING_ALLOWED else said)
    return matcher


def _library_grammar(grammar: Grammar) -> str:
    """ValueError where the text is not even of its kind."""
    if grammar.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(
            grammar.text, defaults={"whitespace_pattern": JSON_WHITESPACE}
        )
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    if grammar.kind == "ebnf":
        return LLMatcher.grammar_from_lark(ebnf_to_lark(grammar.text))
    choices = msgspec.json.decode(grammar.text, type=list[str])
    if not choices or not all(choices):
        raise ValueError("a choice is between one or more strings that are not empty")
    # Lark's strings are JSON's.
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(f"grammar: {message}"[:MAX_MESSAGE_CHARS], param="grammar")


class GrammarConstraint:
    """A `sequence.Constraint`."""

    def __init__(
        self,
        matcher: LLMatcher,
        *,
        after_token_id: int | None,
        stop_token_ids: Rows[int],
        unused_id: int | None,
    ) -> None:
        """matcher: has seen nothing, and nobody else has it but copies of this. stop_token_ids:
        allowed where the output may end. unused_id: see `MatcherTokenizer`."""
        self._fresh = matcher
        self._matcher = matcher.deep_copy()
        self._after_token_id = after_token_id
        self._stop_token_ids = stop_token_ids
        self._unused_id = unused_id
        self._binds = after_token_id is None
        """Whether the free part is over."""
        self._num_seen = 0
        self.gave_up = False

    def copy(self) -> GrammarConstraint:
        return GrammarConstraint(
            self._fresh,
            after_token_id=self._after_token_id,
            stop_token_ids=self._stop_token_ids,
            unused_id=self._unused_id,
        )

    def is_over(self, said: list[int]) -> bool:
        self._see(said)
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def forced(self, said: list[int]) -> list[int]:
        self._see(said)
        if not self._binds or self._matcher.is_error() or self._matcher.is_stopped():
            return []
        forced: list[int] = self._matcher.compute_ff_tokens()
        return forced

    def allow(self, said: list[int], drafts: list[int], mask: NDArray[np.int32]) -> None:
        self.allow_all([(0, self, said, drafts)], mask[None])

    @staticmethod
    def allow_all(
        asked: Rows[tuple[int, GrammarConstraint, list[int], list[int]]], masks: NDArray[np.int32]
    ) -> None:
        """`allow` of many at once, on several threads: row of `masks`, whose, said, drafts."""
        pending = [
            (row, constraint, matcher)
            for row, constraint, said, drafts in asked
            if (matcher := constraint._matcher_behind(said, drafts)) is not None
        ]
        together, alone = [], []
        for row, constraint, matcher in pending:
            if constraint._fills_rows(matcher):
                together.append((matcher, row))
            else:
                alone.append((row, constraint, matcher))
        if len(together) > 1:
            assert masks.flags.c_contiguous
            _executor().unsafe_compute_mask_ptr(
                together, masks.ctypes.data, masks.strides[0], len(masks)
            )
        else:
            alone = pending
        for row, constraint, matcher in alone:
            constraint._fill(matcher, masks[row])
        for row, constraint, matcher in pending:
            constraint._finish(matcher, masks[row])

    def _matcher_behind(self, said: list[int], drafts: list[int]) -> LLMatcher | None:
        """None where all is allowed."""
        self._see(said)
        bound = self._bound_part(drafts)
        if bound is None:
            return None
        matcher = self._matcher
        if bound and not matcher.is_error():
            matcher = matcher.deep_copy()
            fits = matcher.try_consume_tokens(bound) == len(bound)
            if (not fits or matcher.is_stopped()) and not matcher.is_error():
                return None
        return matcher

    def _see(self, said: list[int]) -> None:
        """Take in what is new."""
        assert len(said) >= self._num_seen, "what was said is not taken back"
        new = said[self._num_seen :]
        self._num_seen = len(said)
        bound = self._bound_part(new)
        if bound is None:
            return
        self._binds = True
        if bound and not self._matcher.is_error():
            self._matcher.consume_tokens(bound)

    def _bound_part(self, tokens: list[int]) -> list[int] | None:
        """Those of the next tokens that the grammar is about; None while all are free, and so is
        what follows them."""
        if self._binds:
            return tokens
        if self._after_token_id not in tokens:
            return None
        return tokens[tokens.index(self._after_token_id) + 1 :]

    def _fills_rows(self, matcher: LLMatcher) -> bool:
        """Whether its mask can be computed where it is wanted, beside those of others."""
        return self._unused_id is None and not matcher.is_error()

    def _fill(self, matcher: LLMatcher, mask: NDArray[np.int32]) -> None:
        words = mask
        if self._unused_id is not None:
            words = _mask(max(self._unused_id + 1, 32 * len(mask)))
        if not matcher.is_error():
            _compute_mask(matcher, words)
            mask[:] = words[: len(mask)]

    def _finish(self, matcher: LLMatcher, mask: NDArray[np.int32]) -> None:
        if matcher.is_error():
            mask[:] = 0
            self.gave_up = True
            return
        if self._stop_token_ids and matcher.is_accepting():
            for token_id in self._stop_token_ids:
                mask[token_id // 32] |= _BITS[token_id % 32]
        if self._unused_id is not None and self._unused_id < 32 * len(mask):
            mask[self._unused_id // 32] &= ~_BITS[self._unused_id % 32]


MASK_THREADS = 8


@cache
def _executor() -> LLExecutor:
    """Its threads sleep between masks."""
    return LLExecutor(min(MASK_THREADS, len(os.sched_getaffinity(0))))


_BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)


def _mask(vocab_size: int) -> NDArray[np.int32]:
    return np.full(-(-vocab_size // 32), -1, np.int32)


def _compute_mask(matcher: LLMatcher, mask: NDArray[np.int32]) -> None:
    """The library is told an address, which keeps nothing alive: `mask` does, until it returns."""
    assert mask.flags.c_contiguous
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
