"""Matchers without an engine: masks behind text and guesses, over vocabularies of both kinds; and
the process that compiles grammars first."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import numpy as np
import pytest
from llguidance import LLMatcher
from numpy.typing import NDArray

from engine.errors import EngineOverloaded, InvalidRequest
from engine.protocol import Grammar
from engine.runner.grammar import constraint as grammar_module
from engine.runner.grammar.compiler import GrammarCompiler
from engine.runner.grammar.constraint import (
    GrammarConstraint,
    MatcherTokenizer,
    Vocabulary,
    compile_grammar,
)
from engine.runner.grammar.sandbox import OF_THE_GRAMMAR, GrammarTrial
from engine.text.tokenizer import Tokenizer
from tests.engine.runner.test_grammar import CHOICE, ENDLESS, EOS, JSON, PENNY, SCHEMA, TOKENIZER


def mask_of(constraint: GrammarConstraint, said: list[int], drafts: list[int]) -> NDArray[np.int64]:
    mask = np.full(-(-4096 // 32), -1, np.int32)
    constraint.allow(said, drafts, mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def test_masks_that_are_made_together_are_those_made_alone() -> None:
    tokenizer = MatcherTokenizer(Vocabulary(str(PENNY / "tokenizer.json"), 4096, (EOS, 0)))
    fresh = GrammarConstraint(
        compile_grammar(JSON, tokenizer), after_token_id=None, stop_token_ids=(9,), unused_id=None
    )
    draw = np.random.default_rng(6)
    constraints = [fresh.copy() for _ in range(8)]
    said: list[list[int]] = [[] for _ in constraints]
    for _ in range(30):
        masks = np.full((len(said), 4096 // 32), -1, np.int32)
        asked = [(i, each, said[i], []) for i, each in enumerate(constraints) if i != 3]
        GrammarConstraint.allow_all(asked, masks)
        assert (masks[3] == -1).all(), "nobody asked"
        for i, each, text, _ in asked:
            allowed = np.flatnonzero(np.unpackbits(masks[i].view(np.uint8), bitorder="little"))
            assert list(allowed) == list(mask_of(fresh.copy(), text, []))
            assert list(allowed) == list(mask_of(each, text, []))
            if len(allowed) and EOS not in allowed:
                said[i] = [*text, int(draw.choice(allowed))]


@pytest.mark.parametrize("after_token_id", [None, 77])
def test_guesses_leave_no_trace(after_token_id: int | None) -> None:
    """A mask behind text and guesses is that of a fresh matcher that was shown all of it, whatever
    was guessed before."""
    tokenizer = MatcherTokenizer(Vocabulary(str(PENNY / "tokenizer.json"), 4096, (EOS, 0)))
    fresh = GrammarConstraint(
        compile_grammar(JSON, tokenizer),
        after_token_id=after_token_id,
        stop_token_ids=(),
        unused_id=None,
    )
    draw = np.random.default_rng(5)
    num_behind = 0
    for _ in range(20):
        constraint, said = fresh.copy(), list[int]()
        if after_token_id is not None:
            said = [5, 9, after_token_id][draw.integers(3) :]
        while not constraint.is_over(said) and len(said) < 60:
            drafts: list[int] = []
            for _ in range(draw.integers(6)):
                right = mask_of(fresh.copy(), said + drafts, [])
                drafts.append(int(draw.choice(right)))
                if fresh.copy().is_over(said + drafts):
                    break
                behind = mask_of(constraint, said, drafts)
                assert list(behind) == list(mask_of(fresh.copy(), said + drafts, []))
                num_behind += 1
            mask_of(constraint, said, [*drafts, int(draw.integers(4096)), 5])
            allowed = mask_of(constraint, said, [])
            assert list(allowed) == list(mask_of(fresh.copy(), said, []))
            said = said + [int(draw.choice(allowed))]
        if len(said) < 60:
            bound = said if after_token_id is None else said[said.index(after_token_id) + 1 :]
            jsonschema_rs.validate(SCHEMA, json.loads(TOKENIZER.decode(bound)))
    assert num_behind > 100


def test_what_the_library_writes_to_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told an address, which keeps nothing alive."""
    alive: list[weakref.ref[NDArray[np.int32]]] = []
    make = grammar_module._mask

    def watched(vocab_size: int) -> NDArray[np.int32]:
        mask = make(vocab_size)
        alive.append(weakref.ref(mask))
        return mask

    class Matcher:
        grammar_from_json_schema = staticmethod(LLMatcher.grammar_from_json_schema)

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.is_error = LLMatcher(*arguments, **options).is_error

        def unsafe_compute_mask_ptr(self, address: int, size_bytes: int) -> None:
            mask = alive[-1]()
            assert mask is not None
            assert (mask.ctypes.data, mask.nbytes) == (address, size_bytes)

    monkeypatch.setattr(grammar_module, "_mask", watched)
    monkeypatch.setattr(grammar_module, "LLMatcher", Matcher)
    tokenizer = MatcherTokenizer(Vocabulary(str(PENNY / "tokenizer.json"), 4096, (EOS, 0)))
    assert isinstance(compile_grammar(JSON, tokenizer), Matcher)
    assert alive


def test_what_gave_up_behind_a_guess_allows_nothing_there() -> None:
    """Else the token behind a right guess would be free, and might be EOS."""
    patterns = [f"^(ok|x.*{letter}.{{{30 - i}}})$" for i, letter in enumerate("abc")]
    schema = {"type": "string", "allOf": [{"pattern": pattern} for pattern in patterns]}
    tokenizer = MatcherTokenizer(Vocabulary(str(PENNY / "tokenizer.json"), 4096, (EOS,)))
    matcher = compile_grammar(Grammar(kind="json_schema", text=json.dumps(schema)), tokenizer)
    constraint = GrammarConstraint(
        matcher, after_token_id=None, stop_token_ids=(7,), unused_id=None
    )
    quote = TOKENIZER.encode('"')
    assert list(mask_of(constraint, [], [])) == quote
    assert list(mask_of(constraint, [], quote)) == []
    assert list(mask_of(constraint, [], [])) == quote
    assert list(mask_of(constraint, quote, [])) == []
    assert not constraint.is_over(quote)


@pytest.mark.parametrize("pattern", ["(naïve|日本|[a-z ]{1,8})+!", "😀{2,3}", "( again){3}"])
def test_masks_are_about_the_bytes_that_tokens_stand_for(
    tokenizer_folder: Path, tokenizer: Tokenizer, pattern: str
) -> None:
    """Check either kind of vocabulary, with a model that has a few ids to spare."""
    size, eos = tokenizer.vocab_size + 9, tokenizer.eos_token_id
    assert eos is not None
    library = MatcherTokenizer(Vocabulary(str(tokenizer_folder / "tokenizer.json"), size, (eos,)))
    matcher = compile_grammar(Grammar(kind="regex", text=pattern), library)
    fresh = GrammarConstraint(matcher, after_token_id=None, stop_token_ids=(), unused_id=None)
    draw = np.random.default_rng(0)
    for _ in range(10):
        constraint, said = fresh.copy(), list[int]()
        while not constraint.is_over(said):
            mask = np.full(-(-size // 32), -1, np.int32)
            constraint.allow(said, [], mask)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:size]
            allowed = np.flatnonzero(bits)
            said.append(eos if eos in allowed else int(draw.choice(allowed)))
        text = b"".join(map(tokenizer.token_bytes, said)).removesuffix(b"</s>").decode()
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize("max_bytes", [1 << 20, 1 << 30])
def test_a_compilation_has_only_so_much_memory(max_bytes: int) -> None:
    properties = {f"p{i}": {"type": "string"} for i in range(2500)}
    schema = json.dumps({"type": "object", "properties": properties})
    lines = [
        Vocabulary(str(PENNY / "tokenizer.json"), 4096, (EOS,)),
        Grammar(kind="json_schema", text=schema),
    ]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from engine.runner.grammar import sandbox as trial\n"
            f"trial.MAX_MEMORY_BYTES = {max_bytes}\ntrial.main()",
        ],
        input=b"".join(msgspec.json.encode(line) + b"\n" for line in lines),
        capture_output=True,
        check=False,
    )
    survives = max_bytes > 1 << 20
    assert done.returncode == 0 if survives else done.returncode in OF_THE_GRAMMAR, done.stderr
    assert done.stdout == (b"null\n" if survives else b"")


def test_the_process_that_tries_grammars_ends_with_its_input() -> None:
    trial = GrammarTrial(Vocabulary(str(PENNY / "tokenizer.json"), 4096, (EOS,)))
    trial.check(CHOICE)
    process = trial._process
    assert process is not None and process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0


# ---- a process that was lost

WORDS = Vocabulary(str(PENNY / "tokenizer.json"), 4096, (EOS,))


def test_a_lost_process_leaves_nothing_open() -> None:
    trial = GrammarTrial(WORDS)
    trial.check(CHOICE)
    num_open = len(os.listdir("/proc/self/fd"))
    for number in range(2):
        with pytest.raises(InvalidRequest, match="takes more than"):
            trial.check(Grammar(kind="lark", text=f"start: D{number}\nD{number}: {ENDLESS}"))
        trial.check(CHOICE)
        assert trial._process is not None
        trial._process.kill()
        trial._process.wait()
        trial.check(CHOICE)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_process_that_cannot_be_started_says_nothing_of_a_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = GrammarCompiler(WORDS)

    def fail(*args: object, **options: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", fail)
        for _ in range(2):
            with pytest.raises(EngineOverloaded, match="Too many open files"):
                compiler.prepare("r", CHOICE)
    compiler.prepare("r", CHOICE)
    assert list(compiler._ready) == ["r"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_others_killed_says_nothing_of_a_grammar(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    compiler = GrammarCompiler(WORDS)
    compiler.prepare("one", CHOICE)
    process = compiler._trial._process
    assert process is not None
    os.kill(process.pid, number)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    # As if it died after it was asked whether it lives.
    monkeypatch.setattr(process, "poll", lambda: None)
    with pytest.raises(EngineOverloaded, match="lost"):
        compiler.prepare("two", JSON)
    compiler.prepare("two", JSON)
    assert list(compiler._ready) == ["one", "two"]


@pytest.mark.parametrize(
    "text",
    ["[1]", "1", '{"added_tokens": null, "model": {"vocab": {}}}', '{"model": 1}', "x", "[" * 9]
    + ['{"added_tokens": [{"id": "a"}], "model": {"vocab": {"b": 1}}}'],
)
@pytest.mark.parametrize("eos_token_ids", [(), (0,)])
def test_a_tokenizer_of_another_shape_is_refused_by_name(
    tmp_path: Path, text: str, eos_token_ids: tuple[int, ...]
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json") as refusal:
        GrammarCompiler(Vocabulary(str(path), 4096, eos_token_ids)).prepare("r", CHOICE)
    assert refusal.value.param == "grammar"


def test_the_first_grammar_finds_the_process_running(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(Vocabulary(str(PENNY / "tokenizer.json"), 4096, (EOS, 0)))
    compiler.begin()
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("another process"))
    compiler.prepare("r", CHOICE)
    assert not compiler.constraint("r", CHOICE, ()).is_over([])


def test_a_vocabulary_that_cannot_be_read_is_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    GrammarCompiler(Vocabulary(str(tmp_path / "tokenizer.json"), 4096, (EOS, 0))).begin()
    assert "no usable tokenizer.json" in caplog.text
