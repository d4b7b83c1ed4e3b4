"""Every family's calls are read as they were written, however the text is cut, and whatever is no
call is text."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.output_parser.parser import OutputParser
from engine.text.output_parser.reading.reader import MAX_CALLS, MAX_HELD_CHARS
from engine.text.output_parser.reasoning import THINK
from engine.text.output_parser.registry import FAMILIES, FamilyName
from tests.budget import examples
from tests.engine.text.output_parser.readings import Reading, cuts, read
from tests.engine.text.output_parser.test_json_text import OBJECTS

TOOLS = ("get_weather", "f", "function")
NAMES = sorted(FAMILIES)
MARKERS = sorted({marker for family in FAMILIES.values() for marker in family.markers})
A, B = '{"city": "Zürich"}', "{}"


def parser(family: FamilyName, max_calls: int = MAX_CALLS) -> OutputParser:
    return OutputParser(FAMILIES[family].read, tools=TOOLS, max_calls=max_calls)


def read_in_all_cuts(family: FamilyName, text: str) -> Reading:
    readings = [read(parser(family), pieces) for pieces in cuts(text)]
    assert all(reading == readings[0] for reading in readings)
    return readings[0]


@pytest.mark.parametrize("family", NAMES)
@settings(max_examples=examples(40))
@given(st.lists(st.tuples(st.sampled_from(TOOLS), OBJECTS), min_size=1, max_size=3), st.data())
def test_calls_are_read_as_they_are_written(
    family: FamilyName, calls: list[tuple[str, dict[str, object]]], data: st.DataObject
) -> None:
    written = [(name, json.dumps(value, ensure_ascii=False)) for name, value in calls]
    text = FAMILIES[family].writing.written(written)
    cut = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=20)))
    pieces = [text[a:b] for a, b in zip([0, *cut], [*cut, len(text)], strict=True)]
    reading = read(parser(family), pieces)
    assert reading == Reading(calls=written, ends_with_calls=True)


PIECES = [
    *MARKERS, A, B, "{", "}", "[", "]", ",", ";", '"', ":", " ", "\n", "\n\n", "```", "```json",
    '"name"', '"get_weather"', '"arguments"', '"parameters"', '"id": "x"', "get_weather", "nobody",
    '{"name": "f", "arguments": {"a": [1, "}"]}}', '{"name": "f", "parameters": {}}', "text", "é",
    '{"arguments": {"a": 1}, "name": "f"}', '{"name": "f"}', "<", "<tool",
]  # fmt: skip


@pytest.mark.parametrize("family", NAMES)
@settings(max_examples=examples(40))
@given(st.lists(st.sampled_from(PIECES), max_size=9))
def test_a_text_is_read_the_same_however_it_is_cut(family: FamilyName, words: list[str]) -> None:
    text = "".join(words)
    reading = read_in_all_cuts(family, text)
    if not reading.calls:
        assert reading.content == text
    for _, arguments in reading.calls[: None if reading.ends_with_calls else -1]:
        assert isinstance(json.loads(arguments), dict)
    assert is_within(reading.content, text)


def is_within(part: str, whole: str) -> bool:
    """All characters of `part` come in `whole`, in this order."""
    rest = iter(whole)
    return all(char in rest for char in part)


@pytest.mark.parametrize("family", NAMES)
def test_a_call_that_breaks_off_is_the_beginning_of_one(family: FamilyName) -> None:
    text = FAMILIES[family].writing.written([("get_weather", A)])
    begins = text.index(A)
    for end in range(len(text)):
        reading = read(parser(family), text[:end])
        if end <= begins:
            assert reading == Reading(content=text[:end])
        else:
            said = A[: end - begins]
            assert reading.calls == [("get_weather", said)]
            assert reading.ends_with_calls == (said == A)
            assert reading.content == ""


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize(
    "calls", [[("nobody", A)], [("get_weather", "[]")], [("get_weather", '"x"')]]
)
def test_what_cannot_be_called_is_text(
    family: FamilyName, calls: Sequence[tuple[str, str]]
) -> None:
    text = FAMILIES[family].writing.written(calls)
    assert read_in_all_cuts(family, text) == Reading(content=text)


@pytest.mark.parametrize("family", NAMES)
def test_arguments_that_go_wrong_are_kept_up_to_there_and_the_rest_is_text(
    family: FamilyName,
) -> None:
    writing = FAMILIES[family].writing
    reading = read_in_all_cuts(family, writing.written([("f", '{"a": 1 "b": 2}')]))
    assert reading.calls == [("f", '{"a": 1 ')]
    assert reading.content.startswith('"b": 2}')
    assert not reading.ends_with_calls


@pytest.mark.parametrize("family", ["hermes", "mistral", "mistral_v11", "deepseek_v3"])
def test_content_around_calls_keeps_all_but_its_white_space(family: FamilyName) -> None:
    calls = FAMILIES[family].writing.written([("f", B), ("get_weather", A)])
    reading = read_in_all_cuts(family, f"  Let me see.\n\n{calls}\n Done.\n{calls}\n\n")
    assert reading.content == "  Let me see.\n Done."
    assert reading.calls == [("f", B), ("get_weather", A)] * 2
    assert reading.ends_with_calls


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>{ "arguments": {"a": 1}, "name": "f"}</tool_call> '),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}'),
        ("llama3_json", ' <|python_tag|>{"name": "f", "parameters": {"a": 1}}'),
        ("llama3_json", '{"type": "function", "name": "f", "parameters": {"a": 1}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "123456789"}]'),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}'),
        ("mistral_v11", '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}'),
        ("mistral_v11", '[TOOL_CALLS]f{"a": 1}'),
        ("deepseek_v3", DEEPSEEK := (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
            '{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
        )),
        ("deepseek_v31", DEEPSEEK),
        ("json", '```json\n[{"name": "f", "arguments": {"a": 1}}]\n```'),
        ("json", ' {"name": "f", "parameters": {"a": 1}}'),
    ],
)  # fmt: skip
def test_other_ways_to_write_the_same(family: FamilyName, text: str) -> None:
    expected = Reading(calls=[("f", '{"a": 1}')], ends_with_calls=True)
    assert read_in_all_cuts(family, text) == expected


def test_without_arguments_there_are_none_to_give() -> None:
    reading = read_in_all_cuts("hermes", '<tool_call>{"name": "f"}</tool_call>')
    assert reading == Reading(calls=[("f", "{}")], ends_with_calls=True)


def test_a_call_behind_one_that_is_none_is_found() -> None:
    good = FAMILIES["hermes"].writing.written([("f", B)])
    reading = read_in_all_cuts("hermes", f'<tool_call>{{"name": "nobody"}} {good}')
    assert reading.content == '<tool_call>{"name": "nobody"}'
    assert reading.calls == [("f", B)]


def test_an_object_that_only_looks_like_a_call_is_text() -> None:
    text = '{"name": "Ada", "parameters": {"age": 36}}'
    for family in ("llama3_json", "json"):
        assert read_in_all_cuts(family, text) == Reading(content=text)


# ---- bounds


@pytest.mark.parametrize("family", NAMES)
def test_calls_beyond_the_bound_are_text(family: FamilyName) -> None:
    writing = FAMILIES[family].writing
    text = writing.written([("f", B), ("get_weather", A)])
    for pieces in ((text,), tuple(text)):
        reading = read(parser(family, max_calls=1), pieces)
        assert reading.calls == [("f", B)]
        assert A in reading.content


def test_there_is_a_bound_on_calls_whatever_is_asked_for() -> None:
    text = FAMILIES["hermes"].writing.written([("f", B)] * (MAX_CALLS + 1))
    assert len(read(parser("hermes", max_calls=10**9), [text]).calls) == MAX_CALLS


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"arguments": {"a": "' + "x" * MAX_HELD_CHARS + '"}, "name": "f"}</tool_call>',
        "<tool_call>" + " " * MAX_HELD_CHARS + '{"name": "f"}</tool_call>',
        '<tool_call>{"name": "' + "x" * (2 * MAX_HELD_CHARS),
        " " * (2 * MAX_HELD_CHARS),
    ],
    ids=["arguments first", "white", "name", "only white"],
)
def test_what_is_held_is_bounded(text: str) -> None:
    for size in (1, 100, len(text)):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        held = parser("hermes")
        shown = sum(len(delta.text) for piece in pieces for delta in held.feed(piece))  # type: ignore[union-attr]
        assert shown >= len(text) - MAX_HELD_CHARS - 100
        assert read(parser("hermes"), pieces) == Reading(content=text)


# ---- reasoning


@given(st.text("ab\n <", max_size=8), st.text("ab\n <", max_size=8), st.booleans(), st.booleans())
def test_reasoning_is_apart(thought: str, answer: str, is_open: bool, has_call: bool) -> None:
    call = FAMILIES["hermes"].writing.written([("f", B)]) if has_call else ""
    text = f"{'' if is_open else '<think>'}\n{thought}</think>\n\n{answer}{call}"
    readings = [
        read(
            OutputParser(
                FAMILIES["hermes"].read,
                tools=TOOLS,
                reasoning=THINK,
                reasoning_state="open" if is_open else "unsaid",
            ),
            pieces,
        )
        for pieces in cuts(text)
    ]
    assert all(reading == readings[0] for reading in readings)
    reading = readings[0]
    assert reading.reasoning == thought.lstrip("\n").rstrip()
    answer = answer.lstrip("\n")
    assert reading.content == (answer.rstrip() if has_call else answer)
    assert reading.calls == ([("f", B)] if has_call else [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>never ends \n", Reading(reasoning="never ends \n")),
        (" no <think>thought</think>", Reading(content=" no <think>thought</think>")),
        ("<think></think>", Reading()),
        ("<thin", Reading(content="<thin")),
        (" <tool_call>", Reading(content=" <tool_call>")),
    ],
)
def test_reasoning_stands_at_the_beginning(text: str, expected: Reading) -> None:
    for pieces in cuts(text):
        assert read(OutputParser(None, reasoning=THINK), pieces) == expected


def test_a_prompt_says_where_reasoning_stands() -> None:
    assert THINK.state("<|assistant|><think>\n") == "open"
    assert THINK.state("<|assistant|><think>\n\n</think>\n\n") == "closed"
    assert THINK.state("<think> </think> hello<|assistant|>") == "unsaid"


def test_it_says_while_it_thinks() -> None:
    parser = OutputParser(None, reasoning=THINK)
    states = [
        parser.in_reasoning
        for piece in ("<think>", "a", "</think>", "b")
        if parser.feed(piece) is not None
    ]
    assert states == [True, True, False, False]
