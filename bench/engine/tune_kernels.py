"""Finds launch parameters of the kernels for this device, on the shapes that are served.

    python -m bench.engine.tune_kernels [--budget 540] [--only decode] [--out FOLDER]

Writes `engine/kernels/tuned/<device>.json`, which `engine/kernels/tuning.py` reads; what is in it
and not tried again stays. One parameter after the other is tried with the best of those before. A
choice counts only if its results are those of the default within rounding, and is kept only if all
calls of a workload together take at least MIN_GAIN less. Never run while serving.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.gpu.place import Place, place

MIN_GAIN = 0.02
SAME = 2e-2
"""Relative difference of results that is rounding: sums in another order."""
SECONDS_EACH = 0.05
Table = dict[str, dict[str, dict[str, int]]]


class RecordingTable(dict[str, dict[str, int]]):
    """A table of one operation that notes which keys are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.keys_asked: list[str] = []

    def get(self, key: str, default: Any = None) -> Any:
        if key not in self.keys_asked:
            self.keys_asked.append(key)
        return super().get(key, default)


@contextlib.contextmanager
def using(table: dict[str, Any]) -> Iterator[None]:
    """Wrappers read this table inside."""
    from engine.kernels import tuning

    with mock.patch.object(tuning, "_table", lambda: table):
        yield


class Trial:
    """One workload: its default's times and results, and other choices against them."""

    def __init__(self, here: Place, workload: Any) -> None:
        self._place, self._workload = here, workload
        workload.prepare()  # modules ask for other keys while they are imported
        asked = RecordingTable()
        with using({workload.op: asked}):
            calls = workload.prepare()
            self._results = [call().double() for call in calls]
        self.keys = asked.keys_asked
        """The keys of the operation's table that these shapes read."""
        self._times = self._timed({})
        assert self._times is not None

    def ratio(self, config: dict[str, int]) -> float:
        """Return the ratio of this choice's time to the default's, the calls' geometric mean;
        infinite for one that does not run or is not right."""
        try:
            times = self._timed(config)
        except Exception as error:  # resources that the device has not, shapes that do not fit
            print(f"    {config}: {type(error).__name__}", flush=True)
            if "CUDA error" in str(error):
                raise
            return math.inf
        if times is None:
            print(f"    {config}: another result", flush=True)
            return math.inf
        logs = [math.log(new / old) for new, old in zip(times, self._times or [], strict=True)]
        return math.exp(sum(logs) / len(logs))

    def _timed(self, config: dict[str, int]) -> list[float] | None:
        """Seconds of each call; None where a result is not the default's."""
        table = {self._workload.op: dict.fromkeys(self.keys, config)}
        with using(table):
            calls = self._workload.prepare()
            for call, wanted in zip(calls, self._results, strict=True):
                if not _same(call(), wanted):
                    return None
            return [self._place.median_s(call, SECONDS_EACH) for call in calls]


def _same(found: Tensor, wanted: Tensor) -> bool:
    return bool((found.double() - wanted).norm() <= SAME * wanted.norm())


def tune(trial: Trial, space: dict[str, tuple[int, ...]], deadline: float) -> dict[str, int]:
    """The best choice found by the deadline; empty where the default is as good."""
    best: dict[str, int] = {}
    ratio = 1.0
    for parameter, values in space.items():
        chosen = best
        for value in values:
            if time.monotonic() >= deadline:
                break
            tried = trial.ratio(best | {parameter: value})
            if tried < ratio:
                chosen, ratio = best | {parameter: value}, tried
        best = chosen
    return best if ratio <= 1 - MIN_GAIN else {}


def merge(table: Table, op: str, keys: list[str], config: dict[str, int]) -> None:
    """Choices for `keys` in place of what was there; none is the default."""
    own = table.setdefault(op, {})
    for key in keys:
        own.pop(key, None)
        if config:
            own[key] = config
    if not own:
        del table[op]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes that the interpreter can do")
    parser.add_argument("--only", default="", help="workloads whose name holds this")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds of all workloads")
    parser.add_argument("--out", type=Path, help="folder of the table; else the engine's own")
    given = parser.parse_args()
    here = place(given.device, tiny=given.tiny)
    from bench.gpu.workloads import SPACE, workloads
    from engine.kernels.tuning import TUNED, device_slug, read_table

    if given.tiny and given.out is None:
        parser.error("--tiny measures nothing that should be served: name a folder with --out")
    path = (given.out or TUNED) / f"{device_slug(here.name)}.json"
    table = read_table(path)
    end = time.monotonic() + given.budget
    left = [workload for workload in workloads(here) if given.only in workload.name]
    while left and time.monotonic() < end:
        workload = left.pop(0)
        # Its share of what is left, and twice that for those that stand first.
        share = 2 * (end - time.monotonic()) / (len(left) + 2)
        space = SPACE[workload.op]
        if here.tiny:
            space = {name: values[:2] for name, values in list(space.items())[:1]}
        trial = Trial(here, workload)
        config = tune(trial, space, min(end, time.monotonic() + share))
        merge(table, workload.op, trial.keys, config)
        print(f"{workload.name}: {', '.join(trial.keys)} -> {config or 'default'}", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n")
        if here.device.type == "cuda":
            torch.cuda.empty_cache()
    for workload in left:
        print(f"{workload.name}: no time was left")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
