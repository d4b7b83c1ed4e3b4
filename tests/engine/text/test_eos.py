"""Checks which token ends a text, when only the tokenizer's files say so."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from engine.errors import ConfigError
from engine.weights.registry import load_model_config

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """No file but the tokenizer's names an EOS, and that one by its text."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.add_special_tokens(["<s>", "<|end|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "config.json", CONFIG)
    write(tmp_path / "tokenizer_config.json", {"eos_token": "<|end|>"})
    return tmp_path


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("token", ["<|end|>", {"__type": "AddedToken", "content": "<|end|>"}])
def test_the_tokenizers_eos_is_the_models(folder: Path, token: Any) -> None:
    write(folder / "tokenizer_config.json", {"eos_token": token})
    assert load_model_config(folder).eos_token_ids == (1,)


def test_ids_that_the_model_names_come_first(folder: Path) -> None:
    write(folder / "config.json", {**CONFIG, "eos_token_id": 7})
    assert load_model_config(folder).eos_token_ids == (7,)
    write(folder / "generation_config.json", {"eos_token_id": [8, 9]})
    assert load_model_config(folder).eos_token_ids == (8, 9)


@pytest.mark.parametrize("content", [{}, {"eos_token": None}, {"eos_token": "<|stranger|>"}])
def test_a_model_that_never_stops_by_itself_is_told(
    folder: Path, content: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    write(folder / "tokenizer_config.json", content)
    with caplog.at_level(logging.WARNING):
        assert load_model_config(folder).eos_token_ids == ()
    assert "no file says which token ends a text" in caplog.text


def test_an_eos_outside_the_vocabulary_is_named(folder: Path) -> None:
    write(folder / "config.json", {**CONFIG, "vocab_size": 1})
    with pytest.raises(ConfigError, match="tokenizer_config.json: eos_token: 1 is outside"):
        load_model_config(folder)
