"""LoRA adapters in PEFT's folders: adapter_config.json and adapter_model.safetensors.

Knows names of modules as the checkpoint has them. What PEFT can train and is not served is refused
by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from engine.errors import ConfigError, UnsupportedModel
from engine.layers.parallel import Shard

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
MAX_RANK = 512


class _Config(msgspec.Struct):
    """adapter_config.json, as far as it changes what is computed."""

    r: int
    lora_alpha: float
    peft_type: str = "LORA"
    use_rslora: bool = False
    bias: str = "none"
    use_dora: bool = False
    fan_in_fan_out: bool = False
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, Any] | None = None
    alpha_pattern: dict[str, Any] | None = None
    trainable_token_indices: Any = None
    alora_invocation_tokens: Any = None


class Adapter:
    """One adapter's tensors, handed out once each. Raises ConfigError or UnsupportedModel that
    names the folder and what is wrong."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder
        config = self._read_config()
        self._refuse(config)
        self._scale = config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)
        self._rank = config.r
        try:
            self._tensors = load_file(folder / TENSOR_FILE)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"adapter {name}: {folder / TENSOR_FILE}: {error}") from error

    def take(
        self, module: str, out_features: int, in_features: int, shard: Shard, *, example: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """A [r, in] and B [out, r] with the scale in it, cut like the layer, of the dtype and on
        the device of `example`; None when the adapter leaves `module` alone."""
        if f"{PREFIX}{module}.lora_A.weight" not in self._tensors:
            return None
        a = self._pop(f"{module}.lora_A.weight", (self._rank, in_features))
        b = self._pop(f"{module}.lora_B.weight", (out_features, self._rank)) * self._scale
        if shard.dim == 0:
            b = b.chunk(shard.parts)[shard.place]
        else:
            a = a.chunk(shard.parts, dim=1)[shard.place]
        return a.to(example), b.to(example)

    def check_all_taken(self) -> None:
        """UnsupportedModel names what no layer has asked for."""
        if self._tensors:
            left = sorted(name.removeprefix(PREFIX) for name in self._tensors)
            shown = ", ".join(left[:3]) + (", ..." if len(left) > 3 else "")
            raise UnsupportedModel(
                f"adapter {self.name}: {len(left)} tensors belong to no layer that takes adapters "
                f"(q, k, v, o, gate, up and down projections): {shown}"
            )

    def _pop(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._tensors.pop(PREFIX + name, None)
        if tensor is None:
            raise ConfigError(f"adapter {self.name}: tensor {name} is missing")
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"adapter {self.name}: tensor {name} has shape {list(tensor.shape)}, the model and "
                f"{CONFIG_FILE} ask for {list(shape)}"
            )
        return tensor.to(torch.float32)

    def _read_config(self) -> _Config:
        path = self._folder / CONFIG_FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=_Config)
        except OSError as error:
            raise ConfigError(
                f"adapter {self.name}: {path} cannot be read: {error.strerror}"
            ) from error
        except msgspec.MsgspecError as error:
            raise ConfigError(f"adapter {self.name}: {path}: {error}") from error

    def _refuse(self, config: _Config) -> None:
        unsupported = {
            f"peft_type {config.peft_type}": config.peft_type != "LORA",
            f"bias {config.bias!r}": config.bias != "none",
            "use_dora": config.use_dora,
            "fan_in_fan_out": config.fan_in_fan_out,
            f"modules_to_save {config.modules_to_save}": bool(config.modules_to_save),
            "rank_pattern": bool(config.rank_pattern),
            "alpha_pattern": bool(config.alpha_pattern),
            "trainable_token_indices": config.trainable_token_indices is not None,
            "alora_invocation_tokens": config.alora_invocation_tokens is not None,
        }
        for what, refused in unsupported.items():
            if refused:
                raise UnsupportedModel(f"adapter {self.name}: {what} is not supported")
        if not 1 <= config.r <= MAX_RANK:
            raise ConfigError(f"adapter {self.name}: r ({config.r}) is not in 1..{MAX_RANK}")
