"""Engines as checks and rows ask for them, whatever of it this engine knows yet.

Knows no check and no row.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.gpu.findings import Lacking
from bench.gpu.place import Place
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.protocol import EngineOutput, EngineRequest, SamplingParams
from engine.runner.device.device_runner import DeviceRunner
from engine.transport.startup import Startup

OPTIONAL = {"deterministic": "deterministic", "fp8_kv": "kv_cache_dtype"}
"""By optional feature, the field of `EngineConfig` that turns it on."""


@dataclass(frozen=True, slots=True)
class EngineSwitches:
    """Beside a configuration. None leaves the engine's own choice."""

    deterministic: bool | None = None
    fp8_kv: bool | None = None


def lacking(asked: EngineSwitches) -> list[str]:
    """Fields of `EngineConfig` that are asked for and not there."""
    wanted = [field for name, field in OPTIONAL.items() if getattr(asked, name) is not None]
    return [field for field in wanted if field not in EngineConfig.__struct_fields__]


def configuration(asked: EngineSwitches, **fields: Any) -> EngineConfig:
    """Raises Lacking."""
    absent = lacking(asked)
    if absent:
        raise Lacking(f"EngineConfig has no field {', '.join(absent)}")
    if asked.deterministic is not None:
        fields[OPTIONAL["deterministic"]] = asked.deterministic
    if asked.fp8_kv is not None:
        fields[OPTIONAL["fp8_kv"]] = "fp8" if asked.fp8_kv else "auto"
    return EngineConfig(**fields)


@contextmanager
def engine(config: EngineConfig, startup: Startup | None = None) -> Iterator[EngineCore]:
    """Its memory is free again afterwards."""
    core: EngineCore | None = EngineCore(config, startup=startup)
    try:
        assert core is not None
        yield core
    finally:
        core = None
        free()


@contextmanager
def without_graphs() -> Iterator[None]:
    """Engines that are built inside launch every kernel by itself."""
    with mock.patch.object(DeviceRunner, "capture", lambda self, backend, decodes=None: None):
        yield


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def prompts(place: Place) -> list[list[int]]:
    lengths = place.pick((150, 3, 61, 1, 33), (17, 3))
    return [[3 + (7 * i + 13 * n) % 190 for i in range(n)] for n in lengths]


def answers(
    place: Place, folder: Path, asked: EngineSwitches | None = None, **fields: Any
) -> list[EngineAnswer]:
    """Return what an engine answers to `prompts`, by id; chunks of at most 64 tokens, so that they
    are cut.
    """
    given: dict[str, Any] = {"num_blocks": 128, "max_num_batched_tokens": 64, "itl_target_s": 0.0}
    given |= {"max_num_seqs": 8, "device": place.device.type} | fields
    with engine(configuration(asked or EngineSwitches(), model=folder, **given)) as core:
        return ask(core, prompts(place), place.pick(40, 2), logprobs=1)


@dataclass
class EngineAnswer:
    """One request's answer."""

    token_ids: list[int]
    logprobs: list[float]
    """The logprobs of the generated tokens, if requested."""
    finish_reason: str | None = None


def ask(
    core: EngineCore,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    adapters: Sequence[str] | None = None,
    after_step: Callable[[int], None] | None = None,
    **params: Any,
) -> list[EngineAnswer]:
    """Everything at once, to the end; greedy unless `params` say otherwise."""
    params = {"temperature": 0.0, "ignore_eos": True} | params
    by_id: dict[str, EngineAnswer] = {}
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=max_tokens, **params)
        request = EngineRequest(
            request_id=str(i),
            prompt_token_ids=list(prompt),
            sampling=sampling,
            adapter=adapters[i] if adapters else "",
        )
        core.add(request)
        by_id[str(i)] = EngineAnswer([], [])
    steps = 0
    while core.has_work():
        for output in core.step():
            _take(by_id[output.request_id], output)
        steps += 1
        if after_step is not None:
            after_step(steps)
    core.check_integrity()
    return list(by_id.values())


def _take(answer: EngineAnswer, output: EngineOutput) -> None:
    answer.token_ids += output.token_ids
    answer.logprobs += [each.chosen.logprob for each in output.logprobs or []]
    answer.finish_reason = output.finish_reason or answer.finish_reason
    if output.finish_reason == "error":
        raise RuntimeError(f"request {output.request_id} ended in an error; see the log")


def dummy(place_config: Path, **fields: Any) -> dict[str, Any]:
    """Fields of a configuration over a folder that holds config.json alone."""
    return {"model": place_config, "load_format": "dummy", "itl_target_s": 0.0} | fields
