"""Holds what the rows of one process share: the place, a model's folder, engines that are up.

Knows no row.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.gpu.engines import EngineSwitches, configuration, dummy, free
from bench.gpu.floors import Shape
from bench.gpu.models import LLAMA_8B, TINY, shape_of, write_config
from bench.gpu.place import Place
from engine.core.engine_core import EngineCore

KINDS: dict[str, tuple[EngineSwitches, dict[str, Any]]] = {
    "bf16": (EngineSwitches(), {"dtype": "bfloat16"}),
    "bf16, no prefix cache": (EngineSwitches(), {"dtype": "bfloat16", "prefix_caching": False}),
    "bf16, deterministic": (EngineSwitches(deterministic=True), {"dtype": "bfloat16"}),
    "fp8": (EngineSwitches(fp8_kv=True), {"dtype": "bfloat16", "quantization": "fp8"}),
}
BATCHED_TOKENS = 8192
MAX_MODEL_LEN = 8704
"""A prompt of 8,192 and an answer."""
NUM_SEQS = {"fp8": 512}
"""Running at once; of other kinds 256."""
TOKENS_EACH = {"fp8": 1700}
"""The KV cache tokens for each sequence that may run; 1200 for other kinds, so that two fit."""


class Ground:
    def __init__(self, place: Place, budget_s: float) -> None:
        """budget_s: of the whole run, which begins now; rows that can be scaled look at what is
        left."""
        self.place = place
        self._ends_s = time.monotonic() + budget_s
        self.config = place.pick(LLAMA_8B, TINY)
        self._folder = tempfile.TemporaryDirectory()
        self.model = write_config(self.config, Path(self._folder.name))
        self._cores: dict[str, EngineCore] = {}
        self._rng = random.Random(17)

    @property
    def left_s(self) -> float:
        """Return what is left of the budget, which a process that takes another one's place counts
        anew.
        """
        return self._ends_s - time.monotonic()

    @property
    def shape(self) -> Shape:
        return shape_of(self.config)

    def core(self, kind: str, *, keep: tuple[str, ...] = ()) -> EngineCore:
        """The engine of this kind, started if it is not up; those that are not to be kept beside it
        go down. Raises Lacking."""
        for other in set(self._cores) - {kind, *keep}:
            del self._cores[other]
        free()
        if kind not in self._cores:
            self._cores[kind] = EngineCore(self.configuration(kind))
        return self._cores[kind]

    def configuration(self, kind: str, **fields: Any) -> Any:
        asked, of_kind = KINDS[kind]
        seqs = self.place.pick(NUM_SEQS.get(kind, 256), 4)
        given = dummy(
            self.model,
            device=self.place.device.type,
            max_num_batched_tokens=self.place.pick(BATCHED_TOKENS, 48),
            max_num_seqs=seqs,
            max_model_len=self.place.pick(MAX_MODEL_LEN, 128),
            num_blocks=seqs * self.place.pick(TOKENS_EACH.get(kind, 1200), 64) // 16,
        )
        if self.place.tiny:  # there is no bfloat16 in the interpreter
            of_kind = of_kind | {"dtype": "float16"}
        return configuration(asked, **(given | of_kind | fields))

    def drop(self) -> None:
        """All engines down."""
        self._cores.clear()
        free()

    def prompt(self, length: int) -> list[int]:
        """Never the same twice: nothing of it is in the prefix cache."""
        vocab = self.shape.vocab_size
        return [self._rng.randrange(3, vocab) for _ in range(length)]
