"""Lists which architectures are supported, and reads a checkpoint folder's configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ConfigError, UnsupportedModel
from engine.models import bert, llama, mistral, mixtral, phi3, qwen2, qwen3, qwen3_moe
from engine.models.config import HFConfig, ModelConfig, Traits, model_config, parse, token_ids
from engine.text.tokenizer import Tokenizer, read_tokenizer_config, special_tokens
from engine.weights.embedding_head import read_embedding_head

log = logging.getLogger(__name__)

FAMILIES: dict[str, Callable[[HFConfig], Traits]] = {
    "LlamaForCausalLM": llama.from_hf,
    "MistralForCausalLM": mistral.from_hf,
    "Qwen2ForCausalLM": qwen2.from_hf,
    "Qwen3ForCausalLM": qwen3.from_hf,
    "MixtralForCausalLM": mixtral.from_hf,
    "Phi3ForCausalLM": phi3.from_hf,
    "Qwen3MoeForCausalLM": qwen3_moe.from_hf,
}
HEADLESS = {name.replace("ForCausalLM", "Model"): family for name, family in FAMILIES.items()}
"""The same without a head: they embed."""
ENCODERS = {"BertModel": bert.from_hf}
"""They embed, too."""


def load_model_config(folder: Path) -> ModelConfig:
    """Read config.json and, where it names other EOS ids, generation_config.json; where neither
    names any, the EOS is that of tokenizer_config.json. How it embeds is said beside them.

    Raises ConfigError (absent, broken or misfitting), UnsupportedModel (not built here).
    """
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder} does not exist")
    raw = _read_json(folder / "config.json")
    try:
        names = msgspec.convert(raw.get("architectures"), list[str] | None) or []
    except msgspec.ValidationError as error:
        raise ConfigError(f"{folder / 'config.json'}: architectures: {error}") from error
    known = FAMILIES | HEADLESS | ENCODERS
    name = next((name for name in names if name in known), None)
    if name is None:
        named = ", ".join(names) or "none named"
        supported = ", ".join([*FAMILIES, *ENCODERS])
        raise UnsupportedModel(f"{folder}: architecture {named} is unknown; supported: {supported}")
    hf = parse(raw)
    config = model_config(name, hf, known[name](hf))
    if config.encoder is not None:
        return msgspec.structs.replace(config, embedding=read_embedding_head(folder, "mean"))
    ids = (
        _generation_eos(folder, config.vocab_size)
        or config.eos_token_ids
        or _tokenizer_eos(folder, config.vocab_size)
    )
    return msgspec.structs.replace(
        config, eos_token_ids=ids, generates=name in FAMILIES, embedding=read_embedding_head(folder)
    )


def _generation_eos(folder: Path, vocab_size: int) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    if not generation.exists():
        return ()
    value = _read_json(generation).get("eos_token_id")
    try:
        chosen = msgspec.convert(value, int | list[int] | None)
    except msgspec.ValidationError as error:
        raise ConfigError(f"generation_config.json: eos_token_id: {error}") from error
    return token_ids("generation_config.json: eos_token_id", chosen, vocab_size)


def _tokenizer_eos(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """A model whose EOS nobody names never stops by itself: that is told, and no reason to fail."""
    named = special_tokens(read_tokenizer_config(folder)).get("eos_token")
    found = None if named is None else Tokenizer.load(folder).eos_token_id
    if found is None:
        log.warning("%s: no file says which token ends a text", folder)
    return token_ids("tokenizer_config.json: eos_token", found, vocab_size)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a JSON object: {error}") from error
