"""From a grammar as it was asked for to what keeps a choice to it; each is compiled once.

Above: `core.py`. Below: `grammar_trial.py`, which tries a grammar before anything here has to live
with it, and `grammar.py`. Knows no requests. Any thread may call; one compiles at a time.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence as Rows

from llguidance import LLMatcher

from engine.errors import InvalidRequest
from engine.protocol import Grammar
from engine.runner.grammar import (
    GrammarConstraint,
    MatcherTokenizer,
    Vocabulary,
    compile_grammar,
)
from engine.runner.grammar_trial import GrammarTrial

MAX_CACHED = 256
"""Grammars, and refusals of such."""


class GrammarCache:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._trial = GrammarTrial(vocabulary)
        self._tokenizer: MatcherTokenizer | None = None
        self._compiling = threading.Lock()
        self._found: OrderedDict[bytes, LLMatcher | str] = OrderedDict()
        """By digest, latest use last: what it was compiled to, or why not."""
        self._lookup = threading.Lock()

    def constraint(self, grammar: Grammar, stop_token_ids: Rows[int]) -> GrammarConstraint:
        """What keeps choices to it, stop tokens allowed where it may end. InvalidRequest as
        `prepare`, which takes the waiting out of this."""
        matcher = self.prepare(grammar)
        assert self._tokenizer is not None
        return GrammarConstraint(
            matcher,
            after_token_id=grammar.after_token_id,
            stop_token_ids=stop_token_ids,
            unused_id=self._tokenizer.unused_id,
        )

    def prepare(self, grammar: Grammar) -> LLMatcher:
        """Compile it unless that was done. InvalidRequest, and always the same one, for a grammar
        that is wrong or too much."""
        digest = hashlib.blake2b(f"{grammar.kind}\0{grammar.text}".encode()).digest()
        found = self._look_up(digest)
        if found is None:
            with self._compiling:
                found = self._look_up(digest) or self._compile(grammar)
                self._keep(digest, found)
        if isinstance(found, str):
            raise InvalidRequest(found, param="grammar")
        return found

    def _compile(self, grammar: Grammar) -> LLMatcher | str:
        try:
            self._tokenizer = self._tokenizer or MatcherTokenizer(self._vocabulary)
            self._trial.check(grammar)
            return compile_grammar(grammar, self._tokenizer)
        except InvalidRequest as error:
            return error.message

    def _look_up(self, digest: bytes) -> LLMatcher | str | None:
        with self._lookup:
            found = self._found.get(digest)
            if found is not None:
                self._found.move_to_end(digest)
            return found

    def _keep(self, digest: bytes, found: LLMatcher | str) -> None:
        with self._lookup:
            self._found[digest] = found
            if len(self._found) > MAX_CACHED:
                self._found.popitem(last=False)
