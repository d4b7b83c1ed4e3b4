"""A constrained text is one of its grammar, whatever else is in the batch and however it was
computed: at any temperature, behind guesses, after free reasoning, preempted, a step ahead."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import shutil
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
import torch

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.errors import EngineOverloaded, InvalidRequest
from engine.protocol import (
    MAX_GRAMMAR_BYTES,
    EngineOutput,
    EngineRequest,
    Grammar,
    SamplingParams,
)
from engine.runner.grammar import compiler as grammar_compiler
from engine.runner.speculative.guesser import Worth
from engine.text.tokenizer import Tokenizer
from engine.transport.client import EngineClient
from tests.engine import checkpoints
from tests.engine.peers import Serve, collect, until

PENNY = Path(__file__).resolve().parents[3] / "models" / "penny"
TOKENIZER = Tokenizer.load(PENNY)
EOS = 2
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": "[ ]"},
}
JSON = Grammar(kind="json_schema", text=json.dumps(SCHEMA))
CHOICES = ["yes", "no way", 'a "quoted" maybe\n']
CHOICE = Grammar(kind="choice", text=json.dumps(CHOICES))
ENDLESS = "/.*a.{30}/ & /.*b.{29}/ & ~/.*c.{28}/"
"""Takes for ever to compile."""
HARD = "/ok|x.*a.{30}/ & /ok|x.*b.{29}/ & ~/x.*c.{28}/"
"""Parses, but is too expensive for any text that begins with x."""

TOO_LARGE = [
    {"anyOf": [{"properties": {f"p{i}{k}": {"type": "string"}}} for k in range(5)]}
    for i in range(12)
]
"""As allOf: 5 ** 12 cases."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def start(folder: Path = PENNY, **changes: Any) -> EngineCore:
    options: dict[str, Any] = {"num_blocks": 120, "dtype": "float32", "max_model_len": 300}
    return EngineCore(EngineConfig(model=folder, **(options | changes)))


@pytest.fixture(scope="module")
def penny() -> EngineCore:
    return start()


def ask(
    name: str, grammar: Grammar | None, prompt: str = "Who are you?", n: int = 1, **sampling: Any
) -> EngineRequest:
    params = {"max_tokens": 80, "temperature": 1.0, "seed": 1, "grammar": grammar} | sampling
    return EngineRequest(
        request_id=name,
        prompt_token_ids=TOKENIZER.encode(CHAT.format(prompt)),
        sampling=SamplingParams(**params),
        n=n,
    )


class GrammarOutput(msgspec.Struct):
    token_ids: list[int] = []
    reason: str | None = None
    error_code: str | None = None

    @property
    def text(self) -> str:
        return TOKENIZER.decode(self.token_ids)


def say(core: EngineCore, *requests: EngineRequest) -> dict[str, GrammarOutput]:
    """Return what choice 0 of each says, or choice i as "name.i"; nothing is left behind."""
    for request in requests:
        core.add(request)
    outputs: list[EngineOutput] = []
    while core.has_work():
        outputs += core.step()
    core.check_integrity()
    assert core.status().num_free_blocks == core.resolved.num_blocks
    found: dict[str, GrammarOutput] = {}
    for output in outputs:
        name = output.request_id + (f".{output.index}" if output.index else "")
        said = found.setdefault(name, GrammarOutput())
        said.token_ids += output.token_ids
        said.reason = output.finish_reason or said.reason
        said.error_code = output.error_code or said.error_code
    return found


def mixture() -> list[EngineRequest]:
    """Grammars of every kind, and texts without, sampled and greedy."""
    grammars = [
        None,
        JSON,
        CHOICE,
        Grammar(kind="regex", text="[0-9]{3}( [a-z]{1,6}){2,4}[.!]"),
        Grammar(kind="lark", text='start: "<" word ("," word){2,5} ">"\nword: /[a-z]{1,5}/'),
        None,
        JSON,
    ]
    return [
        ask(
            f"r{i}",
            grammar,
            n=1 + i % 2,
            seed=i,
            temperature=[1.0, 0.0][i % 3 == 2],
            repetition_penalty=[1.0, 1.2][i % 4 == 3],
            max_tokens=80,
            ignore_eos=grammar is None,
        )
        for i, grammar in enumerate(grammars)
    ]


# ---- texts fit


def test_json_follows_its_schema_at_any_temperature(penny: EngineCore) -> None:
    temperatures = [1.0, 1.5, 3.0]
    requests = [
        ask(f"r{seed}", JSON, seed=seed, temperature=temperatures[seed % 3], n=1 + seed % 2)
        for seed in range(24)
    ]
    said = say(penny, *requests)
    assert len({each.text for each in said.values()}) > 20
    for each in said.values():
        assert each.reason == "stop", each.text
        jsonschema_rs.validate(SCHEMA, json.loads(each.text))


def test_white_space_comes_to_an_end(penny: EngineCore) -> None:
    """However much a model likes it."""
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
    grammar = Grammar(kind="json_schema", text=json.dumps(schema))
    blank = {i: 100.0 for i in range(4096) if TOKENIZER.decode([i]).isspace()}
    digits = {i: 50.0 for i in range(4096) if TOKENIZER.decode([i]).isdigit()}
    said = say(penny, ask("r", grammar, logit_bias=blank | digits, max_tokens=290))["r"]
    assert re.match(r"\[\s+\d", said.text), said.text
    assert "\n\n" not in said.text and " " * 66 not in said.text


@pytest.mark.parametrize(
    "pattern", ["[0-9]{3}-[a-z]{2,6}", "(ab|cd)*!", "naïve (日本|😀){2}", r"\w{1,3}(\.\w){0,4}"]
)
def test_texts_match_their_regular_expression(penny: EngineCore, pattern: str) -> None:
    grammar = Grammar(kind="regex", text=pattern)
    (end,) = TOKENIZER.encode("!")  # else a small model says "ab" until there is no room
    said = say(penny, *(ask(f"r{i}", grammar, seed=i, logit_bias={end: 6.0}) for i in range(6)))
    for each in said.values():
        assert each.reason == "stop" and re.fullmatch(pattern, each.text), each.text


def test_a_choice_is_one_of_the_strings(penny: EngineCore) -> None:
    said = say(penny, *(ask(f"r{i}", CHOICE, seed=i, temperature=3.0) for i in range(20)))
    assert {each.text for each in said.values()} == set(CHOICES)
    assert {each.reason for each in said.values()} == {"stop"}


def test_nothing_brings_a_forbidden_token_back(penny: EngineCore) -> None:
    """Neither a bias, nor penalties, nor a minimum beyond what there is to say."""
    (letter,) = TOKENIZER.encode("a")
    said = say(
        penny,
        ask("bias", CHOICE, logit_bias={letter: 100.0, EOS: 100.0}),
        ask("minimum", Grammar(kind="choice", text='["yes"]'), min_tokens=30),
        ask("open", Grammar(kind="regex", text="a+"), min_tokens=9, max_tokens=12),
        ask("penalty", Grammar(kind="regex", text="a{20}"), frequency_penalty=2.0),
    )
    assert said["bias"].text == CHOICES[2]
    assert said["minimum"].text == "yes" and said["minimum"].reason == "stop"
    assert said["penalty"].text == "a" * 20
    assert re.fullmatch("a{9,}", said["open"].text)


def test_stop_tokens_end_a_text_where_it_may_end(penny: EngineCore) -> None:
    (stop,) = TOKENIZER.encode("<|im_start|>")
    grammar = Grammar(kind="regex", text="a{3,}")
    options: dict[str, Any] = {"stop_token_ids": (stop,), "logit_bias": {stop: 100.0}}
    said = say(penny, ask("r", grammar, **options))["r"]
    assert said.reason == "stop" and said.token_ids[-1] == stop
    assert re.fullmatch("a{3,}", TOKENIZER.decode(said.token_ids[:-1]))


def test_a_model_without_eos_stops_where_nothing_can_follow(tmp_path: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json"):
        shutil.copy(PENNY / name, tmp_path)
    config = json.loads((PENNY / "config.json").read_text())
    config["eos_token_id"] = None
    (tmp_path / "config.json").write_text(json.dumps(config))
    core = start(tmp_path)
    assert core.resolved.eos_token_ids == ()
    said = say(
        core,
        ask("json", JSON),
        ask("closed", Grammar(kind="regex", text="a{2,3}b")),
        ask("open", Grammar(kind="regex", text="(ab)+"), max_tokens=9),
    )
    jsonschema_rs.validate(SCHEMA, json.loads(said["json"].text))
    assert said["json"].reason == said["closed"].reason == "stop"
    assert said["open"].reason == "length" and re.match("(ab)+", said["open"].text)


# ---- whatever else happens


def test_neighbours_say_what_they_say_alone(penny: EngineCore) -> None:
    together = say(penny, *mixture())
    alone: dict[str, GrammarOutput] = {}
    for request in mixture():
        alone |= say(penny, request)
    assert together == alone
    assert all(each.error_code is None for each in together.values())


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 8, "max_model_len": 120},
        {"run_ahead": True},
        {"run_ahead": True, "num_blocks": 8, "max_model_len": 120},
        {"max_num_batched_tokens": 24},
        {"speculative": "grammar"},
        {"speculative": "ngram"},
        {"speculative": "ngram", "num_blocks": 9, "max_model_len": 120},
        {"speculative": "draft", "draft_model": PENNY},
    ],
    ids=str,
)
def test_texts_are_the_same_however_they_are_computed(
    penny: EngineCore, options: dict[str, Any]
) -> None:
    core = start(**options)
    assert say(core, *mixture()) == say(penny, *mixture())
    assert (core.status().num_preemptions > 0) == ("num_blocks" in options)


def test_what_a_grammar_leaves_no_choice_about_comes_in_fewer_steps(
    penny: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and punctuation are said several at a time, and all that was guessed is right. Every
    step takes as long as another: on a busy machine guesses may seem not to pay."""
    monkeypatch.setattr(Worth, "observe_step", lambda *_, **__: None)
    names = [f"a_long_name_of_a_field_{letter}" for letter in "abcd"]
    schema = {
        "type": "object",
        "properties": dict.fromkeys(names, {"type": "boolean"}),
        "required": names,
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    grammar = Grammar(kind="json_schema", text=json.dumps(schema))
    plain_steps = penny.status().num_steps
    expected = say(penny, ask("r", grammar, max_tokens=150))
    plain_steps = penny.status().num_steps - plain_steps
    core = start(speculative="grammar")
    before = core.status().num_steps
    assert say(core, ask("r", grammar, max_tokens=150)) == expected
    jsonschema_rs.validate(schema, json.loads(expected["r"].text))
    status = core.status()
    assert status.num_accepted_tokens == status.num_draft_tokens > 20
    assert plain_steps > 2 * (status.num_steps - before)


def test_a_prompt_from_the_prefix_cache(penny: EngineCore) -> None:
    prompt = "Tell me all that you know of the world, and then of yourself. " * 2
    first, again = (say(penny, ask(name, JSON, prompt))[name] for name in ("one", "two"))
    assert first == again and penny.status().prefix_cache_hit_tokens > 0
    jsonschema_rs.validate(SCHEMA, json.loads(again.text))


def test_an_abort_leaves_no_matcher() -> None:
    core = start()
    core.add(ask("r", JSON, n=2))
    for _ in range(4):
        core.step()
    kept = [weakref.ref(seq.constraint) for seq in core._scheduler.running]
    assert len(kept) == 2 and all(ref() is not None for ref in kept)
    core.abort("r")
    gc.collect()
    assert all(ref() is None for ref in kept)


def test_a_text_that_cannot_go_on_ends_alone(penny: EngineCore) -> None:
    """A grammar that is too much for its limits in the midst: an error, and never an EOS. Another
    request of the very same grammar does not share what was used up."""
    grammar = Grammar(kind="lark", text=f"start: A\nA: {HARD}")
    (x,), (o,) = TOKENIZER.encode("x"), TOKENIZER.encode("o")
    for number in range(2):
        said = say(
            penny,
            ask(f"hard{number}", grammar, logit_bias={x: 100.0}),
            *mixture(),
            ask(f"easy{number}", grammar, logit_bias={o: 100.0}),
        )
        hard, easy = said.pop(f"hard{number}"), said.pop(f"easy{number}")
        assert (hard.reason, hard.error_code) == ("error", "grammar_exhausted")
        assert hard.text == "x"
        assert (easy.reason, easy.text) == ("stop", "ok")
        assert said == say(penny, *mixture())


# ---- refused at the door


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind="lark", text=f"start: A\nA: {ENDLESS}"),
        Grammar(kind="lark", text="start: nowhere"),
        Grammar(kind="regex", text="(" * 2000 + ")" * 2000),
        Grammar(kind="regex", text="(a"),
        Grammar(kind="json_schema", text="{"),
        Grammar(kind="json_schema", text='{"type": "nothing"}'),
        Grammar(kind="json_schema", text='{"type": "array", "items":' * 900 + "{}" + "}" * 900),
        Grammar(kind="json_schema", text='{"$ref": "#"}'),
        Grammar(kind="json_schema", text='{"$ref": "http://127.0.0.1:9/schema.json"}'),
        Grammar(kind="json_schema", text=json.dumps({"allOf": TOO_LARGE})),
        Grammar(kind="ebnf", text='root ::= "a" nowhere'),
        Grammar(kind="ebnf", text="root ::= " + "(" * 3_000 + '"a"' + ")" * 3_000),
        Grammar(kind="ebnf", text="root ::= [a-z]{0,1000}{0,1000}"),
        Grammar(kind="ebnf", text="root ::= root"),
        Grammar(kind="choice", text="[]"),
        Grammar(kind="choice", text='["a", ""]'),
        Grammar(kind="choice", text='{"a": 1}'),
        Grammar(kind="regex", text="a" * (MAX_GRAMMAR_BYTES + 1)),
        Grammar(kind="regex", text="\ud800"),
        Grammar(kind="regex", text="a", after_token_id=4096),
        Grammar(kind="regex", text="a", after_token_id=-1),
    ],
    ids=lambda grammar: f"{grammar.kind}-{grammar.text[:30]!a}",
)
def test_what_cannot_be_kept_to_is_refused_by_name(penny: EngineCore, grammar: Grammar) -> None:
    for _ in range(2):
        began_s = time.process_time()
        with pytest.raises(InvalidRequest, match="grammar") as refusal:
            penny.prepare(ask("r", grammar))
        assert refusal.value.param == "grammar" and len(refusal.value.message) <= 200
        assert time.process_time() - began_s < 1.0
    assert say(penny, ask("next", CHOICE))["next"].text in CHOICES


@pytest.mark.parametrize("text", ['{"$ref": "#"}', '{"allOf": [{"$ref": "#"}]}'])
def test_a_schema_of_itself_alone_is_refused_in_words(penny: EngineCore, text: str) -> None:
    with pytest.raises(InvalidRequest, match="no text is of it"):
        penny.prepare(ask("r", Grammar(kind="json_schema", text=text)))


def test_a_refusal_takes_its_time_once(penny: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = Grammar(kind="lark", text=f"start: B\nB: {ENDLESS}")
    trial, tried = penny._grammars._trial, []
    check = trial.check

    def counted(grammar: Grammar) -> None:
        tried.append(grammar)
        check(grammar)

    monkeypatch.setattr(trial, "check", counted)
    for attempt in (penny.prepare, penny.add):
        with pytest.raises(InvalidRequest, match="takes more than"):
            attempt(ask("r", endless))
    assert tried == [endless]
    monkeypatch.undo()
    penny.prepare(ask("r", Grammar(kind="regex", text="after that")))


def test_the_process_that_tries_grammars_ends_with_its_engine() -> None:
    core = start()
    core.prepare(ask("r", CHOICE))
    process = core._grammars._trial._process
    assert process is not None and process.poll() is None
    del core
    gc.collect()
    assert process.poll() is not None


def test_an_engine_without_the_library_refuses_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("compiler", "constraint", "sandbox"):
        monkeypatch.delitem(sys.modules, f"engine.runner.grammar.{name}")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    core = start()
    with pytest.raises(InvalidRequest, match="llguidance is not installed") as refusal:
        core.add(ask("r", CHOICE))
    assert refusal.value.param == "grammar"
    assert say(core, ask("next", None, max_tokens=2))["next"].reason == "length"


async def test_streams_go_on_while_a_grammar_is_refused(serve: Serve) -> None:
    server = await serve(start())
    client = await EngineClient.connect(server.address, timeout_s=30)
    num_tokens = 0

    async def listen() -> None:
        nonlocal num_tokens
        async for output in client.generate(ask("free", None, max_tokens=270, ignore_eos=True)):
            num_tokens += len(output.token_ids)

    listening = asyncio.create_task(listen())
    await until(lambda: num_tokens > 0)
    before = num_tokens
    endless = Grammar(kind="lark", text=f"start: C\nC: {ENDLESS}")
    with pytest.raises(InvalidRequest, match="takes more than") as refusal:
        await collect(client, ask("endless", endless))
    assert refusal.value.param == "grammar" and num_tokens > before + 5
    outputs = await collect(client, ask("json", JSON))
    text = TOKENIZER.decode([token_id for output in outputs for token_id in output.token_ids])
    jsonschema_rs.validate(SCHEMA, json.loads(text))
    await listening
    await client.close()


def test_no_more_than_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_VERDICTS", 2)
    monkeypatch.setattr(grammar_compiler, "MAX_READY", 2)
    compiler = start()._grammars
    for name in "abc":
        compiler.prepare(name, CHOICE)
        compiler.prepare(name, CHOICE)
    compiler.prepare("a", JSON)
    with pytest.raises(InvalidRequest):
        compiler.prepare("d", Grammar(kind="regex", text="(a"))
    assert list(compiler._ready) == ["c", "a"] and len(compiler._verdicts) == 2
    for name in "abcd":
        assert compiler.constraint(name, CHOICE, ()).is_over([]) is False
    assert not compiler._ready


@pytest.mark.parametrize("changes", [{"adapter": "nobody"}, {"dimensions": 4}], ids=str)
def test_nothing_is_compiled_in_vain(penny: EngineCore, changes: dict[str, Any]) -> None:
    wrong = Grammar(kind="regex", text="(a")
    request = msgspec.structs.replace(ask("vain", wrong), **changes)
    for refuse in (penny.prepare, penny.add):
        with pytest.raises(InvalidRequest) as refusal:
            refuse(request)
        assert refusal.value.param in changes


def test_a_refused_request_leaves_no_matcher() -> None:
    core = start(max_waiting=1)
    core.add(ask("r", CHOICE))
    for name, refusal in (("r", InvalidRequest), ("full", EngineOverloaded)):
        core.prepare(ask(name, CHOICE))
        with pytest.raises(refusal):
            core.add(ask(name, CHOICE))
    core.prepare(ask("never", CHOICE))
    assert list(core._grammars._ready) == ["never"]
    assert core.abort("never") == []
    assert not core._grammars._ready


def test_an_end_that_is_ignored_is_no_end(penny: EngineCore) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        penny.add(ask("r", CHOICE, ignore_eos=True))
    assert refusal.value.param == "ignore_eos"


def test_a_model_without_a_tokenizer_refuses_grammars(tmp_path: Path) -> None:
    core = start(checkpoints.save("llama3", tmp_path))
    sampling = SamplingParams(max_tokens=3, grammar=CHOICE)
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json") as refusal:
        core.add(EngineRequest(request_id="r", prompt_token_ids=[5], sampling=sampling))
    assert refusal.value.param == "grammar" and not core.has_work()
