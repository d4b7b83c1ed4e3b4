"""Replicas that point at a scripted upstream, and the text side of a model without a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from engine.chat_template import ChatTemplate
from engine.tokenizer import Tokenizer
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.fleet.upstream import UpstreamReplica
from gateway.wire.from_openai import from_openai
from gateway.wire.request import GenerateRequest
from tests.gateway.fleet.scripted_upstream import API_KEY, UPSTREAM_MODEL, Upstream


@pytest_asyncio.fixture
async def upstream() -> AsyncIterator[Upstream]:
    upstream = Upstream()
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    upstream.base_url = f"http://127.0.0.1:{port}/v1"
    yield upstream
    server.close()
    for exchange in upstream.exchanges:
        exchange.left.set()
        exchange.writer.close()
    await server.wait_closed()


@pytest.fixture
def threads() -> Iterator[PrepareThreads]:
    threads = PrepareThreads()
    yield threads
    threads.close()


MakeReplica = Callable[..., UpstreamReplica]


@pytest_asyncio.fixture
async def make_replica(upstream: Upstream, threads: PrepareThreads) -> AsyncIterator[MakeReplica]:
    made: list[UpstreamReplica] = []

    def make(**options: Any) -> UpstreamReplica:
        defaults: dict[str, Any] = {
            "name": "big@0",
            "base_url": upstream.base_url,
            "upstream_model": UPSTREAM_MODEL,
            "api_key": API_KEY,
            "threads": threads,
        }
        replica = UpstreamReplica(**(defaults | options))
        made.append(replica)
        return replica

    yield make
    for replica in made:
        await replica.close()


@pytest.fixture
def chat() -> Callable[..., GenerateRequest]:
    def make(**fields: Any) -> GenerateRequest:
        body = {"model": "big", "messages": [{"role": "user", "content": "hello"}], **fields}
        return from_openai(json.dumps(body).encode(), "upstream")

    return make


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of one token per byte, and a template that shows everything it is given."""
    folder = tmp_path_factory.mktemp("model")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["</s>", "<user>", "<assistant>", "<system>", *letters]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={name: id_ for id_, name in enumerate(names)}, merges=[])
    )
    backend.add_special_tokens(names[:4])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (folder / "chat_template.jinja").write_text(
        "{%- for m in messages %}"
        "{%- if m.content == 'refuse me' %}{{ raise_exception('no') }}{% endif -%}"
        "<{{ m.role }}>{{ m.content }}</s>"
        "{%- endfor %}<assistant>"
    )
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


@pytest.fixture(scope="session")
def template(model_folder: Path) -> ChatTemplate:
    return ChatTemplate.load(model_folder)
