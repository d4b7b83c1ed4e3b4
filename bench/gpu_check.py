"""Is every kernel right on this GPU, and every model that is served? `make gpu-check`.

    python -m bench.gpu_check                       # one CUDA device, under five minutes
    python -m bench.gpu_check --only attention      # checks whose name holds this
    python -m bench.gpu_check --device cpu --tiny   # the script itself, in Triton's interpreter

Fresh random inputs over poisoned memory; a line a check with its worst error and the limit; exit
code 1 when any is wrong, crashes or hangs. Checks run in a child: what kills it costs one of them.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from typing import Any

from bench.gpu.place import place
from bench.gpu.supervise import serve, supervise_at_once

CHECK_TIMEOUT_S = 180.0
JOBS = max(1, min(8, (os.cpu_count() or 1) // 2))
MODULES = (
    "check_pointwise",
    "check_attention",
    "check_linear",
    "check_sampling",
    "check_itself",
    "check_engine",
)


def _registry() -> dict[str, Any]:
    """Every check by its name. Imports triton."""
    from importlib import import_module

    found: dict[str, Any] = {}
    for module in MODULES:
        found |= import_module(f"bench.gpu.checks.{module}").CHECKS
    return found


def _child(device: str, tiny: bool, names: list[str]) -> None:
    import logging

    from bench.gpu.findings import Lacking, summary

    here = place(device, tiny=tiny)
    checks = _registry()
    logging.getLogger("engine").setLevel(logging.ERROR)

    def run(name: str) -> dict[str, Any]:
        try:
            return summary(checks[name](here))
        except Lacking as lacking:
            return {"lacking": str(lacking)}

    serve([(name, functools.partial(run, name)) for name in names])


def _line(name: str, result: dict[str, Any]) -> str:
    seconds = f"{result.get('seconds', 0):6.1f} s"
    if "lacking" in result:
        return f"absent  {name:<46} {seconds}  {result['lacking']}"
    word = "WRONG " if "error" in result else "right "
    if "cases" not in result:
        return f"{word}  {name:<46} {seconds}  {result['error']}"
    worst = f"worst {result['error_found']:.2g} of {result['limit']:.2g} ({result['worst']})"
    line = f"{word}  {name:<46} {seconds}  {result['cases']:3} cases, {worst}"
    return "\n".join([line, *(f"        {text}" for text in result["wrong"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes that the interpreter can do")
    parser.add_argument(
        "--only", action="append", default=[], help="checks whose name holds this; repeatable"
    )
    parser.add_argument("--budget", type=float, default=290.0, help="seconds; none begins after it")
    parser.add_argument(
        "--jobs", type=int, default=JOBS, help="checks at a time: most of a check is compiling"
    )
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        _child(asked.device, asked.tiny, asked.child)
        return
    began = time.monotonic()
    here = place(asked.device, tiny=asked.tiny)
    registry = _registry()
    if not any(name.endswith("against transformers") for name in registry):
        print("not installed: transformers; engines are checked against themselves", flush=True)
    names = [n for n in registry if any(part in n for part in asked.only or [""])]
    if not names:
        sys.exit(f"no check's name holds {asked.only!r}")
    print(f"on {here.name}", flush=True)
    command = ["bench.gpu_check", "--device", asked.device, *(["--tiny"] if asked.tiny else [])]
    results = {}
    for name, result in supervise_at_once(
        command,
        names,
        jobs=min(asked.jobs, len(names)),
        piece_timeout_s=CHECK_TIMEOUT_S,
        budget_s=asked.budget,
    ):
        results[name] = result
        print(_line(name, result), flush=True)
    wrong = sum("error" in result for result in results.values())
    absent = sum("lacking" in result for result in results.values())
    right = len(results) - wrong - absent
    took = time.monotonic() - began
    print(f"{right} right, {wrong} wrong, {absent} not built, in {took:.0f} s")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
