"""Small tokenizers of the two kinds that the supported models use, trained here in milliseconds,
and engines behind real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from engine.fake.engine import FakeCore
from engine.text.tokenizer import Tokenizer
from engine.transport.frames import open_connection
from engine.transport.server import EngineServer
from tests.engine.peers import GatedCore, Join, Peer, Serve

CORPUS = [
    "the quick brown fox jumps over the lazy dog, again and again and again",
    "def main() -> int:\n    return 0\n" * 3,
    "日本語のテキストと中文文本 日本語 中文 日本 中文",
    "naïve café über straße — “quotes” … 😀😀👍🏽👨‍👩‍👧",
    'user assistant system <tool_call> {"name": "add"} </tool_call>',
]
SPECIAL_TOKENS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen: BPE over bytes, so that characters are split over tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<tool_call>"])  # added, yet not special
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral 7B: BPE over characters, bytes for the unknown, U+2581 for spaces."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=200,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=list("abcdefghijklmnopqrstuvwxyz▁\n"),
        limit_alphabet=60,
        show_progress=False,
    )
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    vocab = dict(model["vocab"])
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [tuple(merge) for merge in model["merges"]]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.add_special_tokens(SPECIAL_TOKENS)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback}


@pytest.fixture(scope="session", params=sorted(KINDS))
def tokenizer_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A model folder as far as text is concerned; without a chat template."""
    folder = tmp_path_factory.mktemp(request.param)
    KINDS[request.param]().save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


@pytest_asyncio.fixture
async def serve(
    tmp_path: Path,
) -> AsyncIterator[Serve]:
    """`await serve(core, address)`: a started server; closed, and its core checked, at the end."""
    started: list[tuple[EngineServer, FakeCore]] = []

    async def start(core: FakeCore, address: str = f"unix:{tmp_path}/engine.sock") -> EngineServer:
        server = EngineServer(core, address)
        await server.start()
        started.append((server, core))
        return server

    yield start
    for server, core in started:
        await server.close()
        core.check_integrity()


@pytest_asyncio.fixture
async def join() -> AsyncIterator[Join]:
    """`await join(server)`: a connected peer, gone at the end."""
    joined: list[Peer] = []

    async def connect(server: EngineServer) -> Peer:
        joined.append(Peer(*await open_connection(server.address)))
        return joined[-1]

    yield connect
    for peer in joined:
        peer.vanish()
    await asyncio.sleep(0)  # the loop closes what was aborted


@pytest_asyncio.fixture
async def gated(serve: Serve) -> AsyncIterator[tuple[GatedCore, EngineServer]]:
    core = GatedCore()
    server = await serve(core)
    yield core, server
    core.allow(10_000)  # so that the thread can be joined
