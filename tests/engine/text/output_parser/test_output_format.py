"""engine.text.output_parser.OutputFormat: which family a model is of, and what an output has to be
that must call: whatever the grammar lets through is read as valid calls.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from engine.protocol import Grammar
from engine.runner.grammar.constraint import (
    GrammarConstraint,
    MatcherTokenizer,
    Vocabulary,
    compile_grammar,
)
from engine.text.chat_template import ChatTemplate
from engine.text.output_parser.grammars.forced_calls import Tool
from engine.text.output_parser.output_format import OutputFormat
from engine.text.output_parser.reasoning import THINK, ReasoningState
from engine.text.output_parser.registry import FAMILIES, FamilyName, detect_family, detect_reasoning
from engine.text.tokenizer import Tokenizer
from tests.engine.text.output_parser.readings import Reading, read

PENNY = Path(__file__).resolve().parents[4] / "models" / "penny"
EOS = (2, 0)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [Tool("get_weather", SCHEMA), Tool("list_all")]
NAMES = [tool.name for tool in TOOLS]
SCHEMAS = {tool.name: tool.schema for tool in TOOLS}
FAMILY_NAMES = sorted(FAMILIES)


def added(content: str, token_id: int) -> dict[str, Any]:
    """As tokenizers of these families have their markers: those of reasoning are not special."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = content not in (THINK.opens, THINK.closes)
    return {"id": token_id, "content": content, "special": special} | flags


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """penny's tokenizer and the markers of all families."""
    tokenizer = json.loads((PENNY / "tokenizer.json").read_bytes())
    known = {token["content"] for token in tokenizer["added_tokens"]}
    markers = {marker for family in FAMILIES.values() for marker in family.markers}
    markers |= {THINK.opens, THINK.closes}
    for token_id, marker in enumerate(sorted(markers - known), start=4096):
        tokenizer["added_tokens"].append(added(marker, token_id))
    path = tmp_path_factory.mktemp("markers")
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def matcher_tokenizer(folder: Path, tokenizer: Tokenizer) -> MatcherTokenizer:
    return MatcherTokenizer(Vocabulary(str(folder / "tokenizer.json"), tokenizer.vocab_size, EOS))


class Speaker:
    """Says anything that a grammar allows, and seldom more of what may end."""

    def __init__(self, tokenizer: Tokenizer, matchers: MatcherTokenizer) -> None:
        self._tokenizer = tokenizer
        self._matchers = matchers
        self._closing_id = tokenizer.token_to_id(THINK.closes)

    def say(self, grammar: Grammar, draw: random.Random) -> str:
        matcher = compile_grammar(grammar, self._matchers)
        constraint = GrammarConstraint(
            matcher, after_token_id=grammar.after_token_id, stop_token_ids=(), unused_id=None
        )
        said: list[int] = []
        while not constraint.is_over(said):
            assert len(said) < 2000
            allowed = self._allowed(constraint, said)
            assert allowed, self._tokenizer.decode(said, skip_special_tokens=False)
            if set(allowed) & set(EOS) and draw.random() < 0.5:
                break
            if self._closing_id in allowed and draw.random() < 0.2:
                allowed = [self._closing_id]
            said.append(draw.choice([i for i in allowed if i not in EOS]))
        return self._tokenizer.decode(said, skip_special_tokens=False)

    def _allowed(self, constraint: GrammarConstraint, said: list[int]) -> list[int]:
        mask = np.full(-(-self._tokenizer.vocab_size // 32), -1, np.int32)
        constraint.allow(said, [], mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        return [int(i) for i in np.flatnonzero(bits) if i < self._tokenizer.vocab_size]


@pytest.fixture(scope="module")
def speaker(tokenizer: Tokenizer, matcher_tokenizer: MatcherTokenizer) -> Speaker:
    return Speaker(tokenizer, matcher_tokenizer)


def check_calls(reading: Reading) -> None:
    assert reading.ends_with_calls
    for name, arguments in reading.calls:
        jsonschema_rs.validate(SCHEMAS[name], json.loads(arguments))


@pytest.mark.parametrize("state", [None, "open", "unsaid", "closed"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_what_must_call_calls(
    family: FamilyName, state: ReasoningState | None, tokenizer: Tokenizer, speaker: Speaker
) -> None:
    reasoning, state = ("none", "unsaid") if state is None else ("think", state)
    form = OutputFormat(tokenizer, "", family=family, reasoning=reasoning)  # type: ignore[arg-type]
    grammar = form.forced(TOOLS, max_calls=3, reasoning_state=state)
    for seed in range(4):
        text = speaker.say(grammar, random.Random(seed))
        reading = read(form.parser(tools=NAMES, reasoning_state=state), text)
        check_calls(reading)
        assert reading.content == ""
        assert len(reading.calls) <= 3


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_named_one_is_called_once(
    family: FamilyName, tokenizer: Tokenizer, speaker: Speaker
) -> None:
    form = OutputFormat(tokenizer, "", family=family)
    text = speaker.say(form.forced(TOOLS[:1], max_calls=1), random.Random(1))
    reading = read(form.parser(tools=NAMES), text)
    check_calls(reading)
    assert [name for name, _ in reading.calls] == ["get_weather"]


ANSWER = Grammar(kind="json_schema", text='{"const": {"answer": 42}}')


MARKED = [name for name in FAMILY_NAMES if name not in ("json", "llama3_json")]


def test_which_families_mark_their_calls(tokenizer: Tokenizer) -> None:
    forms = {name: OutputFormat(tokenizer, "", family=name) for name in FAMILY_NAMES}
    assert [name for name, form in forms.items() if form.marks_calls] == MARKED


@pytest.mark.parametrize("state", ["open", "closed"])
@pytest.mark.parametrize("family", MARKED)
def test_who_may_call_calls_or_answers(
    family: FamilyName,
    state: ReasoningState,
    tokenizer: Tokenizer,
    speaker: Speaker,
    matcher_tokenizer: MatcherTokenizer,
) -> None:
    form = OutputFormat(tokenizer, "", family=family, reasoning="think")
    grammar = form.offered(TOOLS, ANSWER, max_calls=2, reasoning_state=state)
    called = 0
    for seed in range(6):
        text = speaker.say(grammar, random.Random(seed))
        reading = read(form.parser(tools=NAMES, reasoning_state=state), text)
        if reading.calls:
            called += 1
            check_calls(reading)
            assert reading.content == ""
        else:
            assert json.loads(reading.content) == {"answer": 42}
    assert called
    thought = "hm</think>" if state == "open" else ""
    answer = tokenizer.encode(f'{thought}{{"answer": 42}}')
    matcher = compile_grammar(grammar, matcher_tokenizer)
    assert matcher.try_consume_tokens(answer) == len(answer) and matcher.is_accepting()


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_who_may_call_says_what_it_likes_but_calls_validly(
    family: FamilyName, matcher_tokenizer: MatcherTokenizer, tokenizer: Tokenizer
) -> None:
    """Free text passes and may end anywhere; where a call begins only a valid one goes on."""
    form = OutputFormat(tokenizer, "", family=family)
    writing = FAMILIES[family].writing
    valid, invalid = ('{"city": "Ulm"}', '{"town": "Ulm"}')
    matcher = compile_grammar(form.offered(TOOLS), matcher_tokenizer)

    def accepts(text: str) -> bool:
        fresh, ids = matcher.deep_copy(), tokenizer.encode(text)
        return bool(fresh.try_consume_tokens(ids) == len(ids) and fresh.is_accepting())

    assert accepts("") and accepts("Hello, {you}!\n\nBye <b>")
    assert accepts(writing.written([("get_weather", valid)]))
    assert accepts(writing.written([("list_all", "{}")]))
    assert not accepts(writing.written([("get_weather", invalid)]))
    assert not accepts(writing.written([("nobody", "{}")]))
    if family in MARKED:
        assert accepts("Let me see.\n" + writing.written([("get_weather", valid)] * 2))
        assert not accepts("Let me see.\n" + writing.written([("get_weather", invalid)]))


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_markers_that_are_not_special_are_text(family: FamilyName) -> None:
    """A vocabulary without the family's markers writes them letter by letter."""
    tokenizer = Tokenizer.load(PENNY)
    matchers = MatcherTokenizer(Vocabulary(str(PENNY / "tokenizer.json"), 4096, EOS))
    form = OutputFormat(tokenizer, "", family=family, reasoning="think")
    assert not form.shown_ids
    speaker = Speaker(tokenizer, matchers)
    text = speaker.say(form.forced(TOOLS, max_calls=2, reasoning_state="closed"), random.Random(2))
    check_calls(read(form.parser(tools=NAMES), text))


def test_reasoning_without_tokens_of_its_own_ends_at_its_marker() -> None:
    tokenizer = Tokenizer.load(PENNY)
    matchers = MatcherTokenizer(Vocabulary(str(PENNY / "tokenizer.json"), 4096, EOS))
    grammar = OutputFormat(tokenizer, "", family="hermes", reasoning="think").forced(
        TOOLS, reasoning_state="open"
    )
    matcher = compile_grammar(grammar, matchers)
    thought = tokenizer.encode("thinking\n</think>\n\n<tool_call>\n")
    assert matcher.try_consume_tokens(thought) == len(thought)
    nonsense = tokenizer.encode("nonsense")
    assert matcher.try_consume_tokens(nonsense) == 0


@pytest.mark.parametrize("state", ["open", "unsaid", "closed"])
@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        ("json_schema", json.dumps(SCHEMA), r"(?s)\{.*\}"),
        ("regex", r"a/b\/[0-9]{2}\n?", r"a/b/[0-9]{2}\n?"),
        ("choice", '["yes", "a \\"quoted\\" \\u00e9"]', 'yes|a "quoted" é'),
        ("lark", 'start: "{" word\nword: /[}]{2}/', r"\{\}\}"),
        ("ebnf", 'root ::= "{" start\nstart ::= [}]{2}', r"\{\}\}"),
    ],
)
def test_an_answer_behind_reasoning_fits(
    kind: Any,
    text: str,
    pattern: str,
    state: ReasoningState,
    tokenizer: Tokenizer,
    speaker: Speaker,
) -> None:
    form = OutputFormat(tokenizer, "", family="hermes", reasoning="think")
    grammar = form.answering(Grammar(kind=kind, text=text), reasoning_state=state)
    for seed in range(3):
        said = speaker.say(grammar, random.Random(seed))
        reading = read(form.parser(tools=NAMES, reasoning_state=state), said)
        assert re.fullmatch(pattern, reading.content)
        assert reading.reasoning == "" or state != "closed"


# ---- which family


def templates() -> Iterator[tuple[str, str, str]]:
    yield "<tool_call>\n{{ name }}", "hermes", "none"
    yield "<think>{{ x }}</think> <tool_call>", "hermes", "think"
    yield "<tool_call>\n<function={{ name }}>", "json", "none"
    yield '{{ "[TOOL_CALLS] [" }}', "mistral", "none"
    yield '{{ "[TOOL_CALLS]" + name + "[ARGS]" }}[THINK]', "mistral_v11", "mistral"
    yield "<｜tool▁calls▁begin｜> ```json </think>", "deepseek_v3", "think"
    yield "<｜tool▁calls▁begin｜> </think>", "deepseek_v31", "think"
    yield "{{ messages }}", "json", "none"


@pytest.mark.parametrize(("template", "family", "reasoning"), list(templates()))
def test_a_family_is_told_by_its_template(template: str, family: str, reasoning: str) -> None:
    assert detect_family(template, lambda token: False) == family
    assert detect_reasoning(template) == reasoning


def test_llama_is_told_by_its_token() -> None:
    assert detect_family("{{ messages }}", lambda token: token == "<|python_tag|>") == "llama3_json"


def test_penny_writes_as_hermes_does() -> None:
    template = ChatTemplate.load(PENNY)
    form = OutputFormat(Tokenizer.load(PENNY), template.source)
    assert (form.family, form.reasoning) == ("hermes", "none")
    assert template.takes_tools
    call = {"function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call, call]}]
    said = template.render(messages, add_generation_prompt=False).rpartition("assistant\n")[2]
    reading = read(form.parser(tools=NAMES), said.removesuffix("<|im_end|>\n"))
    assert reading.calls == [("get_weather", '{"city": "Zürich"}')] * 2
    assert reading.ends_with_calls


def test_what_is_named_is_not_guessed() -> None:
    form = OutputFormat(Tokenizer.load(PENNY), "<tool_call>", family="json", reasoning="mistral")
    assert (form.family, form.reasoning) == ("json", "mistral")


def test_without_tools_nothing_is_called(tokenizer: Tokenizer) -> None:
    text = FAMILIES["hermes"].writing.written([("get_weather", "{}")])
    form = OutputFormat(tokenizer, "<tool_call>")
    assert read(form.parser(), text) == Reading(content=text)


def test_special_markers_are_shown(tokenizer: Tokenizer) -> None:
    form = OutputFormat(tokenizer, "[TOOL_CALLS]")
    assert tokenizer.token_to_id("[TOOL_CALLS]") in form.shown_ids
    assert tokenizer.token_to_id("<tool_call>") not in form.shown_ids


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_tool_of_free_text_is_called_with_a_text_of_its_grammar(
    family: FamilyName, tokenizer: Tokenizer, speaker: Speaker
) -> None:
    lark = 'start: ("+" /[ -~\\n]{0,8}/ "\\n")+ "\\"" /[0-9]/'
    tool = Tool("patch", text_lark=lark)
    form = OutputFormat(tokenizer, "", family=family, reasoning="none")
    for grammar in (form.forced([tool], max_calls=1), form.offered([tool], max_calls=1)):
        for seed in range(3):
            reading = read(form.parser(tools=["patch"]), speaker.say(grammar, random.Random(seed)))
            for name, arguments in reading.calls:
                given = json.loads(arguments)
                assert name == "patch" and given.keys() == {"input"}
                assert re.fullmatch(r'(\+[ -~\n]{0,8}\n)+"[0-9]', given["input"])
            assert reading.calls or grammar != form.forced([tool], max_calls=1)
