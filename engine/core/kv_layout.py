"""Names all that makes the KV blocks of two engines the same bytes.

Two engines with the same weights, adapters and options compute the same keys and values, up to
rounding; those of any other are never mixed with them. A name is made of the contents of the
model's files.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import torch

from engine.config import BLOCK_SIZE, EngineConfig, ResolvedConfig
from engine.model_files import contents_of

FORMAT = 1
"""To be raised when a change of the code gives the same tokens other keys or values."""
HASHES = "weights.json"


def layout_digest(resolved: ResolvedConfig, block_bytes: int, hashes: Path | None) -> bytes:
    """Return the 32 bytes of the name. hashes: the file that keeps what was hashed before; None:
    nothing is kept. Raises OSError."""
    config, machine = resolved.config, [resolved.device, str(torch.__version__)]
    contents = contents_of(_folders(config), hashes).items()
    parts = {
        "format": FORMAT,
        "files": [each for each in sorted(contents) if not _is_of_text(each[0])],
        "load_format": config.load_format,
        "seed": config.seed if config.load_format == "dummy" else 0,
        "quantization": config.quantization,
        "dtype": resolved.dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "max_model_len": config.max_model_len,
        "block": [BLOCK_SIZE, block_bytes],
        # What is promised to the bit is not mixed with what another machine rounds otherwise.
        "deterministic": machine if config.deterministic else None,
    }
    return hashlib.blake2b(msgspec.json.encode(parts, order="sorted"), digest_size=32).digest()


def _folders(config: EngineConfig) -> dict[str, Path]:
    folders = {f"adapter {name}": folder for name, folder in config.adapters.items()}
    folders["model"] = config.model
    if config.draft_model is not None:
        folders["draft"] = config.draft_model
    return folders


def _is_of_text(place: str) -> bool:
    """Tell whether a file says how text becomes tokens, of which blocks know nothing."""
    return Path(place).name.startswith("tokenizer")
