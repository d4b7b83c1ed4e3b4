"""As `test_field_table`, of the routes that take plain prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from openai.types import completion_create_params, embedding_create_params

from gateway.generate_request import GenerateRequest
from gateway.request_errors import BadField
from gateway.wire.fields.surfaces import COMPLETIONS, EMBEDDINGS, SurfaceFields
from gateway.wire.fields.table import rows
from gateway.wire.openai.completions import from_completions
from gateway.wire.openai.embeddings import from_embeddings
from gateway.wire.openai.tokenizing import from_detokenize, from_tokenize

Read = Callable[..., Any]


def reads(from_body: Callable[[bytes, Any], GenerateRequest], **needed: Any) -> Read:
    def read(**fields: Any) -> GenerateRequest:
        body = {"model": "m", **needed, **fields}
        return from_body(json.dumps(body).encode(), "engine")

    return read


COMPLETE = reads(from_completions, prompt="a")
EMBED = reads(from_embeddings, input="a")
HONOURED: list[tuple[Read, dict[str, Any], dict[str, Any]]] = [
    (COMPLETE, {}, each)
    for each in (
        *({"model": "o"}, {"prompt": [1]}, {"max_tokens": 0}, {"n": 2}, {"echo": True}),
        *({"logprobs": 0}, {"temperature": 0}, {"top_p": 0}, {"frequency_penalty": 1}),
        *({"presence_penalty": 1}, {"logit_bias": {"5": 1}}, {"stop": "x"}, {"seed": 1}),
        *({"stream": True}, {"top_k": 5}, {"min_p": 0.5}, {"repetition_penalty": 1.5}),
        *({"min_tokens": 5}, {"ignore_eos": True}, {"stop_token_ids": [5]}),
        *({"include_stop_str_in_output": True}, {"skip_special_tokens": False}),
        *({"prompt_logprobs": 1}, {"return_token_ids": True}, {"priority": 1}),
        *({"return_tokens_as_token_ids": True}, {"response_format": {"type": "json_object"}}),
        *({"structured_outputs": {"regex": "x"}}, {"guided_json": {"type": "object"}}),
        *({"guided_regex": "x"}, {"guided_choice": ["x"]}, {"guided_grammar": 'start: "x"'}),
    )
]
HONOURED.append((COMPLETE, {"logprobs": 1}, {"logprob_token_ids": [5]}))
HONOURED.append((COMPLETE, {"stream": True}, {"stream_options": {"include_usage": True}}))
HONOURED += [
    (EMBED, {}, each)
    for each in (
        *({"model": "o"}, {"input": ["a", "b"]}, {"encoding_format": "base64"}),
        {"dimensions": 5},
    )
]


@pytest.mark.parametrize(("read", "others", "changed"), HONOURED)
def test_what_is_honoured_changes_the_request(
    read: Read, others: dict[str, Any], changed: dict[str, Any]
) -> None:
    assert read(**others, **changed) != read(**others)


@pytest.mark.parametrize("read", [COMPLETE, EMBED])
def test_a_label_changes_nothing(read: Read) -> None:
    assert read(user="u") == read()


def test_as_many_as_are_returned_may_be_made() -> None:
    assert COMPLETE(n=2, best_of=2) == COMPLETE(n=2)
    assert EMBED(encoding_format="float") == EMBED()


@pytest.mark.parametrize(
    ("surface", "theirs", "read"),
    [
        (COMPLETIONS, completion_create_params.CompletionCreateParamsBase, COMPLETE),
        (EMBEDDINGS, embedding_create_params.EmbeddingCreateParams, EMBED),
    ],
)
def test_every_field_of_openais_is_known_and_tried(
    surface: SurfaceFields, theirs: Any, read: Read
) -> None:
    top = {row.path: row.treatment for row in rows(surface) if "." not in row.path}
    assert theirs.__annotations__.keys() <= top.keys()
    tried = {name for each, _, changed in HONOURED if each is read for name in changed}
    honoured = {path for path, treatment in top.items() if treatment == "honoured"}
    assert honoured - {"best_of"} == tried


def test_embeddings_of_a_prompt_are_refused_unless_there_are_none() -> None:
    assert COMPLETE(prompt_embeds=[]) == COMPLETE(prompt_embeds=None) == COMPLETE()
    for value in ("QUJD", ["QUJD"]):
        with pytest.raises(
            BadField, match="not supported: a prompt is text or token ids"
        ) as caught:
            COMPLETE(prompt_embeds=value)
        assert caught.value.param == "prompt_embeds"


@pytest.mark.parametrize("beside", [{"stop": "x"}, {"guided_regex": "x"}])
def test_nothing_but_the_model_ends_what_has_a_least_length(beside: dict[str, Any]) -> None:
    with pytest.raises(BadField) as caught:
        COMPLETE(min_tokens=3, **beside)
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize("value", [True, "x", {}, [], 0])
def test_a_suffix_is_refused(value: Any) -> None:
    with pytest.raises(BadField) as caught:
        COMPLETE(suffix=value)
    assert caught.value.param == "suffix"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}, "chat_template"),
        ({"prompt": "a", "max_tokens": 1}, "max_tokens"),
    ],
)
def test_what_is_to_be_tokenized_is_one_thing(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadField) as caught:
        from_tokenize(json.dumps({"model": "m", **body}).encode())
    assert caught.value.param == param


def test_what_stands_around_a_text_unless_said() -> None:
    text = from_tokenize(b'{"model":"m","prompt":"a"}')
    assert (text.text, text.add_special_tokens) == ("a", True)
    chat = from_tokenize(b'{"model":"m","messages":[{"role":"user","content":"a"}]}')
    assert chat.chat is not None and chat.chat.add_generation_prompt and not chat.add_special_tokens
    assert from_detokenize(b'{"model":"m","tokens":[1,2]}').read().tolist() == [1, 2]
