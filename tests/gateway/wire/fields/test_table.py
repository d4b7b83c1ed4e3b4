"""The code does what docs/fields.md says of chats, messages and responses: of the fields at the top
each honoured one changes what is asked of a model, each ignored one does not, and each refused one
is refused by its name. Those of plain prompts are in `test_plain_fields`."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params

from gateway.generate_request import GenerateRequest
from gateway.request_errors import BadField
from gateway.wire.anthropic.from_anthropic import from_anthropic
from gateway.wire.fields.surfaces import CHAT, MESSAGES, RESPONSES, SurfaceFields
from gateway.wire.fields.table import page, rows
from gateway.wire.openai.from_chat import from_openai
from gateway.wire.openai_responses.from_responses import own_items, read_response, to_generate

PAGE = Path(__file__).resolve().parents[4] / "docs" / "fields.md"
HELLO = [{"role": "user", "content": "hello"}]
BEGUN = {"role": "assistant", "content": "Sure,"}

# ---- chat

CHAT_SCHEMA = {"type": "object"}
CHAT_TOOL = {"type": "function", "function": {"name": "f"}}
CHAT_HONOURED: dict[str, Any] = {
    "prompt_cache_key": "k",
    "model": "other",
    "messages": [{"role": "user", "content": "bye"}],
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "n": 2,
    "temperature": 0,
    "top_p": 0.5,
    "frequency_penalty": 1,
    "presence_penalty": 1,
    "logit_bias": {"5": 1},
    "stop": "x",
    "seed": 1,
    "logprobs": True,
    "stream": True,
    "service_tier": "flex",
    "reasoning_effort": "none",
    "reasoning": {"effort": "none"},
    "response_format": {"type": "json_object"},
    "top_k": 5,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "min_tokens": 5,
    "ignore_eos": True,
    "stop_token_ids": [5],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "prompt_logprobs": 1,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "priority": -3,
    "echo": True,
    "add_generation_prompt": False,
    "chat_template_kwargs": {"enable_thinking": False},
    "structured_outputs": {"regex": "x"},
    "tools": [CHAT_TOOL],
    "functions": [{"name": "f"}],
    "guided_json": CHAT_SCHEMA,
    "guided_regex": "x",
    "guided_choice": ["x"],
    "guided_grammar": 'start: "x"',
}
CHAT_BESIDE: dict[str, tuple[dict[str, Any], Any]] = {
    "top_logprobs": ({"logprobs": True}, 3),
    "tool_choice": ({"tools": [CHAT_TOOL]}, "required"),
    "parallel_tool_calls": ({"tools": [CHAT_TOOL]}, False),
    "stream_options": ({"stream": True}, {"include_usage": True}),
    "logprob_token_ids": ({"logprobs": True}, [5]),
    "function_call": ({"functions": [{"name": "f"}]}, "none"),
    "continue_final_message": ({"messages": [*HELLO, BEGUN]}, True),
}
"""Fields that have a meaning only beside others: the others, and a value."""
CHAT_ONLY_REFUSES: dict[str, Any] = {
    "modalities": ["text"],
    "verbosity": "medium",
}
"""Honoured, with the only value that is taken: what happens anyway."""
CHAT_IGNORED: dict[str, Any] = {
    "user": "u",
    "safety_identifier": "u",
    "metadata": {"a": "b"},
    "store": True,
}


# ---- messages

MESSAGES_TOOL = {"name": "f", "input_schema": {"type": "object"}}
MESSAGES_SCHEMA = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
MESSAGES_HONOURED: dict[str, Any] = {
    "model": "other",
    "messages": [{"role": "user", "content": "bye"}],
    "system": "Be kind.",
    "max_tokens": 5,
    "temperature": 0,
    "top_p": 0.5,
    "top_k": 5,
    "stop_sequences": ["x"],
    "stream": True,
    "tools": [MESSAGES_TOOL],
    "thinking": {"type": "disabled"},
    "output_config": MESSAGES_SCHEMA,
    "cache_control": {"type": "ephemeral"},
    "service_tier": "standard_only",
}
MESSAGES_BESIDE: dict[str, tuple[dict[str, Any], Any]] = {
    "tool_choice": ({"tools": [MESSAGES_TOOL]}, {"type": "any"}),
}
"""Fields that have a meaning only beside others: the others, and a value."""
MESSAGES_SAME: dict[str, Any] = {
    "metadata": {"user_id": "u"},
    "speed": "standard",
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}
"""Ignored, or honoured with the only value that is taken: what happens anyway."""


# ---- responses

RESPONSES_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
RESPONSES_HONOURED: dict[str, Any] = {
    "model": "other",
    "input": "bye",
    "instructions": "be brief",
    "tools": [RESPONSES_TOOL],
    "text": {"format": {"type": "json_object"}},
    "reasoning": {"effort": "low"},
    "max_output_tokens": 5,
    "temperature": 0,
    "top_p": 0.5,
    "include": ["message.output_text.logprobs"],
    "stream": True,
    "service_tier": "flex",
    "seed": 1,
    "stop": ["x"],
    "top_k": 5,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "prompt_cache_key": "k",
}
RESPONSES_BESIDE: dict[str, tuple[dict[str, Any], Any]] = {
    "tool_choice": ({"tools": [RESPONSES_TOOL]}, "required"),
    "parallel_tool_calls": ({"tools": [RESPONSES_TOOL]}, False),
    "top_logprobs": ({"include": ["message.output_text.logprobs"]}, 3),
}
RESPONSES_ELSEWHERE: dict[str, Any] = {
    "store": False,
    "background": True,
    "conversation": "conv_1",
    "previous_response_id": "resp_1",
    "truncation": "disabled",
    "max_tool_calls": 3,
    "metadata": {"a": "b"},
    "user": "u",
    "safety_identifier": "u",
    "stream_options": {"include_obfuscation": False},
    "client_metadata": {"a": {"b": 1}},
}
"""Fields that the gateway handles itself: the model's request does not hold them."""


def read_chat(**fields: Any) -> GenerateRequest:
    return from_openai(json.dumps({"model": "m", "messages": HELLO, **fields}).encode(), "engine")


def read_messages(**fields: Any) -> GenerateRequest:
    body = {"model": "m", "max_tokens": 2000, "messages": HELLO, **fields}
    return from_anthropic(json.dumps(body).encode(), "engine")


def read_responses(**fields: Any) -> GenerateRequest:
    request = read_response(json.dumps({"model": "m", "input": "hello", **fields}).encode())
    return to_generate(request, own_items(request, {}))


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    read: Callable[..., GenerateRequest]
    surface: SurfaceFields
    honoured: Mapping[str, Any]
    beside: Mapping[str, tuple[dict[str, Any], Any]]
    same: Mapping[str, Any]
    theirs: Collection[str] = ()
    """Fields of the vendor's own SDK."""

    @property
    def treatments(self) -> dict[str, str]:
        return {row.path: row.treatment for row in rows(self.surface) if "." not in row.path}

    @property
    def refused(self) -> list[str]:
        return [path for path, treatment in self.treatments.items() if treatment == "refused"]


TRIALS = {
    "chat": Trial(
        read=read_chat,
        surface=CHAT,
        honoured=CHAT_HONOURED,
        beside=CHAT_BESIDE,
        same=CHAT_ONLY_REFUSES | CHAT_IGNORED,
        theirs=completion_create_params.CompletionCreateParamsBase.__annotations__,
    ),
    "messages": Trial(
        read=read_messages,
        surface=MESSAGES,
        honoured=MESSAGES_HONOURED,
        beside=MESSAGES_BESIDE,
        same=MESSAGES_SAME,
    ),
    "responses": Trial(
        read=read_responses,
        surface=RESPONSES,
        honoured=RESPONSES_HONOURED,
        beside=RESPONSES_BESIDE,
        same=RESPONSES_ELSEWHERE,
        theirs=response_create_params.ResponseCreateParamsBase.__annotations__,
    ),
}


def named(names: Callable[[Trial], Collection[str]]) -> Iterator[Any]:
    for surface, trial in TRIALS.items():
        for name in names(trial):
            yield pytest.param(trial, name, id=f"{surface}-{name}")


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: make fields"


@pytest.mark.parametrize("trial", TRIALS.values(), ids=TRIALS.keys())
def test_every_field_is_known_and_tried(trial: Trial) -> None:
    tried = {*trial.honoured, *trial.beside, *trial.same}
    assert trial.treatments.keys() - set(trial.refused) == tried
    assert set(trial.theirs) <= trial.treatments.keys()


def test_what_chat_ignores_are_labels() -> None:
    treatments = TRIALS["chat"].treatments
    ignored = {path for path, treatment in treatments.items() if treatment == "ignored"}
    assert ignored == CHAT_IGNORED.keys()


@pytest.mark.parametrize(("trial", "name"), list(named(lambda trial: trial.honoured)))
def test_what_is_honoured_changes_the_request(trial: Trial, name: str) -> None:
    assert trial.read(**{name: trial.honoured[name]}) != trial.read()


@pytest.mark.parametrize(("trial", "name"), list(named(lambda trial: trial.beside)))
def test_what_is_honoured_beside_others_changes_the_request(trial: Trial, name: str) -> None:
    others, value = trial.beside[name]
    assert trial.read(**others, **{name: value}) != trial.read(**others)


@pytest.mark.parametrize(("trial", "name"), list(named(lambda trial: trial.same)))
def test_what_is_not_the_models_changes_nothing_of_what_it_is_asked(
    trial: Trial, name: str
) -> None:
    others = {"stream": True} if name == "stream_options" else {}
    assert trial.read(**others, **{name: trial.same[name]}) == trial.read(**others)


@pytest.mark.parametrize(("trial", "name"), list(named(lambda trial: trial.refused)))
def test_what_is_refused_is_refused_by_its_name(trial: Trial, name: str) -> None:
    for value in (True, "x", {}, [], 0):
        with pytest.raises(BadField) as caught:
            trial.read(**{name: value})
        assert caught.value.param == name
