"""`tollgate.json` of a model's folder: bounds for requests that name none, names for free calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.fake.engine import FakeCore, FakeEngine
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from gateway.fleet.engine.folder_options import (
    MAX_FILE_BYTES,
    NO_OPTIONS,
    FolderOptions,
    read_folder_options,
)
from gateway.fleet.engine.job import EngineJob
from gateway.fleet.engine.replica import EngineReplica
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.fleet.replica import PreparedRequest
from gateway.request_errors import BadField
from gateway.wire.openai.from_chat import from_openai

PENNY = Path(__file__).resolve().parents[4] / "models" / "penny"
OPTIONS = FolderOptions(default_max_tokens=20, free_string_chars=5)
SHOWS_TOOLS = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}<tool_call>"
MENTIONS_TOOLS = (
    "{% if tools %}tools{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}<tool_call>"
)
FREE: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}


def test_the_folders_own_file_is_read(tmp_path: Path) -> None:
    assert read_folder_options(tmp_path) == NO_OPTIONS
    (tmp_path / "tollgate.json").write_text('{"default_max_tokens": 7}')
    assert read_folder_options(tmp_path) == FolderOptions(default_max_tokens=7)


def test_penny_has_bounds() -> None:
    found = read_folder_options(PENNY)
    assert found.default_max_tokens == 256
    assert found.bounds_schemas


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("{", "tollgate.json"),
        ('{"default_max_tokens": 0}', "default_max_tokens"),
        ('{"free_strings": 7}', "free_strings"),
        ('{"free_items": "many"}', "free_items"),
        (" " * (MAX_FILE_BYTES + 1), "bytes"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, field: str) -> None:
    (tmp_path / "tollgate.json").write_text(text)
    with pytest.raises(ConfigError, match=field) as refusal:
        read_folder_options(tmp_path)
    assert "tollgate.json" in refusal.value.message


@pytest.fixture
def replica(tokenizer: Tokenizer, threads: PrepareThreads) -> EngineReplica:
    return EngineReplica(
        name="m@0",
        client=FakeEngine(FakeCore(vocab_size=tokenizer.vocab_size)),
        tokenizer=tokenizer,
        template=ChatTemplate({"default": SHOWS_TOOLS}, {}),
        threads=threads,
        options=OPTIONS,
    )


async def prepared(replica: EngineReplica, **fields: Any) -> PreparedRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields}
    return await replica.prepare(from_openai(json.dumps(body).encode(), "engine"))


async def test_a_request_without_a_bound_gets_the_folders(replica: EngineReplica) -> None:
    assert (await prepared(replica)).max_output_tokens == 20
    assert (await prepared(replica, n=2)).max_output_tokens == 40
    assert (await prepared(replica, max_tokens=30)).max_output_tokens == 30
    assert (await prepared(replica, min_tokens=25)).max_output_tokens == 25
    with pytest.raises(BadField, match="min_tokens"):
        await prepared(replica, max_tokens=5, min_tokens=25)


def schema_of(request: PreparedRequest) -> str:
    assert isinstance(request.payload, EngineJob)
    grammar = request.payload.request.sampling.grammar
    assert grammar is not None
    return grammar.text.replace(" ", "")


async def test_free_strings_of_schemas_and_tools_are_bounded(replica: EngineReplica) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": FREE}}
    assert '"maxLength":5' in schema_of(await prepared(replica, response_format=form))
    tool = {"type": "function", "function": {"name": "f", "parameters": FREE}}
    asked = await prepared(replica, tools=[tool], tool_choice="required")
    assert '"maxLength":5' in schema_of(asked)


GUIDED = FolderOptions(guides_calls=True)


@pytest.fixture
def guided(tokenizer: Tokenizer, threads: PrepareThreads) -> EngineReplica:
    return EngineReplica(
        name="m@0",
        client=FakeEngine(FakeCore(vocab_size=tokenizer.vocab_size)),
        tokenizer=tokenizer,
        template=ChatTemplate({"default": MENTIONS_TOOLS}, {}),
        threads=threads,
        options=GUIDED,
    )


def grammar_of(request: PreparedRequest) -> str | None:
    assert isinstance(request.payload, EngineJob)
    grammar = request.payload.request.sampling.grammar
    return None if grammar is None else grammar.text


async def test_free_calls_are_guided_by_the_names_of_tools_and_parameters(
    guided: EngineReplica, replica: EngineReplica
) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "pattern": "a(b"}}}
    tool = {"type": "function", "function": {"name": "look_up", "parameters": schema}}
    grammar = grammar_of(await prepared(guided, tools=[tool]))
    assert grammar is not None and "look_up" in grammar and "city" in grammar
    assert "a(b" not in grammar, "what the request left free is not refused for its form"
    assert grammar_of(await prepared(replica, tools=[tool])) is None
    assert grammar_of(await prepared(guided)) is None
    assert grammar_of(await prepared(guided, tools=[tool], tool_choice="none")) is None


async def test_what_would_be_a_large_grammar_guides_nothing(guided: EngineReplica) -> None:
    schema = {"type": "object", "properties": {f"a_{at}": {"type": "string"} for at in range(30)}}
    tools = [
        {"type": "function", "function": {"name": f"tool_{at}", "parameters": schema}}
        for at in range(60)
    ]
    assert grammar_of(await prepared(guided, tools=tools)) is None
    assert grammar_of(await prepared(guided, tools=tools[:2])) is not None
