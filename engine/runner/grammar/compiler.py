"""From a grammar as it was asked for to what keeps a choice to it.

Knows of requests their ids. Any thread may call; one compiles at a time.

What is remembered of a grammar is whether it compiles. Each request has a matcher of its own:
copies of one share what it learns, and the limits on that, so one request's text could end
another's.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence as Rows
from typing import TypeVar

from llguidance import LLMatcher

from engine.errors import EngineError, InvalidRequest
from engine.protocol import Grammar
from engine.runner.grammar.constraint import (
    GrammarConstraint,
    MatcherTokenizer,
    Vocabulary,
    compile_grammar,
)
from engine.runner.grammar.sandbox import GrammarTrial

logger = logging.getLogger(__name__)

MAX_VERDICTS = 4096
MAX_READY = 64
"""Matchers of requests that were prepared and did not arrive yet: as many as may wait to be
prepared (`server.py`). One may take some 40 MB; one that was dropped is compiled again."""
FITS = ""
"""Verdict on a grammar that compiles."""

Digest = bytes
K = TypeVar("K")
V = TypeVar("V")


class GrammarCompiler:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._trial = GrammarTrial(vocabulary)
        self._tokenizer: MatcherTokenizer | None = None
        self._compiling = threading.Lock()
        self._verdicts: OrderedDict[Digest, str] = OrderedDict()
        """FITS or why not, latest use last."""
        self._ready: OrderedDict[str, tuple[Digest, LLMatcher]] = OrderedDict()
        """By request id; latest last."""

    def prepare(self, request_id: str, grammar: Grammar) -> None:
        """Compile it for a request unless that was done. InvalidRequest, and always the same one,
        for a grammar that is wrong or too much. EngineOverloaded where it cannot be tried now."""
        digest = _digest(grammar)
        if self._is_ready(request_id, digest):  # the step thread waits for nobody's compilation
            return
        with self._compiling:
            if not self._is_ready(request_id, digest):
                matcher = self._compile(grammar, digest)
                self._ready.pop(request_id, None)  # so that it is latest; `forget` may come between
                self._ready[request_id] = digest, matcher
                _drop_oldest(self._ready, MAX_READY)

    def begin(self) -> None:
        """Read the vocabulary and start the process that tries grammars, before a request has to
        wait for that. What goes wrong is logged, and is told to who has a grammar."""
        try:
            self.prepare("", Grammar(kind="choice", text='["a"]'))
        except EngineError as error:
            logger.warning("%s", error.message)
        self.forget("")

    def forget(self, request_id: str) -> None:
        """A request that was prepared does not arrive."""
        self._ready.pop(request_id, None)

    def _is_ready(self, request_id: str, digest: Digest) -> bool:
        ready = self._ready.get(request_id)
        return ready is not None and ready[0] == digest

    def constraint(
        self, request_id: str, grammar: Grammar, stop_token_ids: Rows[int]
    ) -> GrammarConstraint:
        """Return what keeps a request that was prepared to its grammar, stop tokens allowed where
        the output may end. Raises as `prepare`, if that was too long ago.
        """
        digest = _digest(grammar)
        ready = self._ready.pop(request_id, None)
        if ready is not None and ready[0] == digest:
            matcher = ready[1]
        else:
            with self._compiling:
                matcher = self._compile(grammar, digest)
        assert self._tokenizer is not None
        return GrammarConstraint(
            matcher,
            after_token_id=grammar.after_token_id,
            stop_token_ids=stop_token_ids,
            unused_id=self._tokenizer.unused_id,
        )

    def _compile(self, grammar: Grammar, digest: Digest) -> LLMatcher:
        # Not in the verdict: what is wrong with a file is not wrong with the grammar.
        self._tokenizer = self._tokenizer or MatcherTokenizer(self._vocabulary)
        try:
            verdict = self._verdicts.get(digest)
            if verdict:
                raise InvalidRequest(verdict, param="grammar")
            if verdict is None:
                self._trial.check(grammar)
            matcher = compile_grammar(grammar, self._tokenizer)
        except InvalidRequest as error:
            self._remember(digest, error.message)
            raise
        self._remember(digest, FITS)
        return matcher

    def _remember(self, digest: Digest, verdict: str) -> None:
        self._verdicts[digest] = verdict
        self._verdicts.move_to_end(digest)
        _drop_oldest(self._verdicts, MAX_VERDICTS)


def _digest(grammar: Grammar) -> Digest:
    return hashlib.blake2b(f"{grammar.kind}\0{grammar.text}".encode()).digest()


def _drop_oldest(entries: OrderedDict[K, V], most: int) -> None:
    while len(entries) > most:
        entries.popitem(last=False)
