"""docs/gpu.md from the newest recorded run, or "not measured yet".

    python -m bench.gpu.page

No torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.gpu.floors import H200, Roofline
from bench.gpu.models import LLAMA_8B, shape_of
from bench.gpu.rows.rows import ROWS, Row, shown

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "gpu.md"
BENCHMARK = "gpu"
BAR = 30
"""Characters of a whole floor."""
INTRODUCTION = """\
# On a GPU

Written by `python -m bench.gpu.page` from the newest run in `bench/results/`; edit that, not this.

Model: the shape of Llama-3.1-8B (6.98 B parameters in layers, 0.525 B in the head, 128 KiB of KV a
token in bfloat16) with random weights, 1,024 tokens of context. A floor is the least time that the
bytes and operations of a step allow at the rates measured on the same device in the same run
(`bench/gpu/floors.py`); the fraction says how near a figure comes to it.
"""
HOW = """\
## How to run it

Needed: a CUDA device and a Python (3.11 or later) with torch, triton, numpy, safetensors,
tokenizers, msgspec and jinja2; for the comparison and the checks against it, transformers.
Nothing is fetched and nothing is installed.

    make gpu-check                      # is it right? under 5 minutes
    make gpu-bench                      # is it fast? under 8 minutes; records, draws this page

Where a pure wheel is missing and nothing can be installed, unpack it into a folder and name that
folder. Both in one line, with the results in a folder of their own:

    export PYTHONPATH=.wheels GPU_PYTHON=python3; make gpu-check; make gpu-bench ARGS='--out out'

`ARGS='--only decode'` runs the rows whose name holds that, `ARGS='--budget 1500'` allows more time;
`ARGS='--device cpu --tiny'` tries the scripts themselves in Triton's interpreter, without a GPU.
The replay, the last row, has all its 2,000 requests where 200 seconds are left for it, as they are
with `ARGS='--only replay'`, and says how many it had.

Launch parameters are found once per device, never while serving:

    python3 -m bench.engine.tune_kernels       # writes engine/kernels/tuned/<device>.json
"""


def newest(folder: Path = RESULTS) -> dict[str, Any] | None:
    """The last recorded run on a GPU."""
    runs = []
    for path in folder.glob("*.json"):
        result = json.loads(path.read_text())
        if result.get("benchmark") == BENCHMARK:
            runs.append(result)
    return max(runs, key=lambda run: str(run["at"]), default=None)


def draw(result: dict[str, Any] | None) -> str:
    """The whole page."""
    if result is None:
        return "\n".join([INTRODUCTION, *_unmeasured(), HOW])
    return "\n".join([INTRODUCTION, *_measured(result), HOW])


def goal_text(row: Row) -> str:
    if row.goal is None:
        return "-"
    if row.floor is not None:
        return f">= {row.goal:.0%}"
    return f"{'>=' if row.rate else '<='} {shown(row.goal, row.unit)}"


def _unmeasured() -> list[str]:
    """Floors at the rates that were measured elsewhere."""
    shape = shape_of(LLAMA_8B)
    lines = ["## Not measured yet", ""]
    lines += [
        "No GPU was at hand. Floors are those of an H200 (4.3 TB/s, 790 TFLOP/s in bf16).",
        "",
    ]
    lines += ["| | floor | to reach | measured |", "|---|---|---|---|"]
    for row in ROWS:
        floor = "-" if row.floor is None else shown(row.floor(H200, shape), row.unit)
        lines.append(f"| {row.title} | {floor} | {goal_text(row)} | not measured yet |")
    return [*lines, ""]


def _measured(result: dict[str, Any]) -> list[str]:
    shape, found = shape_of(LLAMA_8B), result["rows"]
    roofline = Roofline(**result["roofline"])
    lines = [f"## {result['device']}, {result['at'][:10]}", "", _setting(result, roofline), ""]
    lines += ["| | figure | floor | fraction | to reach | |", "|---|---|---|---|---|---|"]
    bars = []
    for row in ROWS:
        entry = found.get(row.name, {"error": "not measured"})
        if "figure" not in entry:
            why = entry.get("error") or entry.get("lacking")
            lines.append(f"| {row.title} | - | - | - | {goal_text(row)} | {why} |")
            continue
        figure, floor = entry["figure"], None
        if row.floor is not None:
            floor = row.floor(roofline, shape)
        reached = row.reached(figure, floor)
        word = {True: "reached", False: "missed", None: ""}[reached]
        remark = entry.get("detail", {}).get("remark", "")
        fraction = "-" if floor is None else f"{row.fraction(figure, floor):.0%}"
        floor_text = "-" if floor is None else shown(floor, row.unit)
        last = f"{word}; {remark}" if remark else word
        cells = (shown(figure, row.unit), floor_text, fraction, goal_text(row), last)
        lines.append(f"| {row.title} | {' | '.join(cells)} |")
        if floor is not None:
            bars.append(_bar(row, row.fraction(figure, floor)))
    return [*lines, "", *_bars(bars)]


def _setting(result: dict[str, Any], roofline: Roofline) -> str:
    measured = "measured first" if result["roofline_measured"] else "NOT measured in this run"
    return (
        f"Roofline, {measured}: copy {shown(roofline.bytes_per_s, 'TB/s')}, products "
        f"{shown(roofline.bf16_flops, 'TFLOP/s')} in bf16 and "
        f"{shown(roofline.fp8_flops, 'TFLOP/s')} in fp8. {result['software']}."
    )


def _bar(row: Row, fraction: float) -> str:
    """`=` up to what is reached, `|` where the goal is."""
    filled = min(BAR, round(BAR * fraction))
    cells = list("=" * filled + " " * (BAR - filled))
    if row.goal is not None:
        cells[min(BAR - 1, round(BAR * row.goal))] = "|"
    return f"{row.name:<24}[{''.join(cells)}] {fraction:4.0%}"


def _bars(bars: list[str]) -> list[str]:
    if not bars:
        return []
    return ["Fraction of the floor (`|` is to reach):", "", "```", *bars, "```", ""]


def write(result: dict[str, Any] | None, page: Path = PAGE) -> None:
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(draw(result))


if __name__ == "__main__":
    write(newest())
