"""The text side of a model without a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from engine.chat_template import ChatTemplate
from engine.tokenizer import Tokenizer
from gateway.fleet.prepare_threads import PrepareThreads


@pytest.fixture
def threads() -> Iterator[PrepareThreads]:
    threads = PrepareThreads()
    yield threads
    threads.close()


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
