"""How near the engine comes to what this GPU can do: `make gpu-bench`.

    python -m bench.gpu_bench                          # one CUDA device, under eight minutes
    python -m bench.gpu_bench --only decode            # rows whose name holds this; repeatable
    python -m bench.gpu_bench --device cpu --tiny      # the script itself, in Triton's interpreter

The roofline is measured first; then each row's figure stands beside its floor, the fraction and
what is to be reached. Rows run in a child: one that crashes or hangs prints its error, and the
others go on. The result goes to `bench/results/<date>-<device>.json` (or --out FOLDER), and
docs/gpu.md is drawn anew.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.gpu import page
from bench.gpu.floors import H200, Roofline
from bench.gpu.models import LLAMA_8B, TINY, shape_of
from bench.gpu.place import Place, place
from bench.gpu.rows.rows import ROOFLINE, ROWS, measurement, named, shown
from bench.gpu.supervise import serve, supervise

ROW_TIMEOUT_S = 240.0
BUDGET_S = 470.0
PACKAGES = ("torch", "triton", "transformers")
HEADING = f"{'':<58}{'figure':>16}{'floor':>15}{'fraction':>10}  to reach"


def _child(here: Place, budget_s: float, names: list[str]) -> None:
    import logging

    from bench.gpu.findings import Lacking
    from bench.gpu.ground import Ground

    logging.getLogger("engine").setLevel(logging.ERROR)
    ground = Ground(here, budget_s)

    def run(name: str) -> dict[str, Any]:
        try:
            return measurement(name)(ground)
        except Lacking as lacking:
            return {"lacking": str(lacking)}

    serve([(name, functools.partial(run, name)) for name in names])


def _line(name: str, result: dict[str, Any], roofline: Roofline, tiny: bool) -> str:
    row = named(name)
    if "figure" not in result:
        return f"{row.title:<58}{'-':>16}  {result.get('error') or result.get('lacking')}"
    figure, floor = result["figure"], None
    if row.floor is not None:
        floor = row.floor(roofline, shape_of(TINY if tiny else LLAMA_8B))
    parts = f"{row.title:<58}{shown(figure, row.unit):>16}"
    parts += f"{'-' if floor is None else shown(floor, row.unit):>15}"
    parts += f"{'-' if floor is None else f'{row.fraction(figure, floor):.0%}':>10}"
    reached = {True: "reached", False: "missed", None: ""}[row.reached(figure, floor)]
    remark = result.get("detail", {}).get("remark", "")
    return f"{parts}  {page.goal_text(row)} {reached}  {remark}".rstrip()


def _software() -> str:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join([f"Python {platform.python_version()}", *found])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes that the interpreter can do")
    parser.add_argument(
        "--only", action="append", default=[], help="rows whose name holds this; repeatable"
    )
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of all rows")
    parser.add_argument("--out", type=Path, help="folder for the JSON and the page")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    asked = _arguments()
    here = place(asked.device, tiny=asked.tiny)
    if asked.child:
        _child(here, asked.budget, asked.child)
        return
    rows = [row.name for row in ROWS if any(part in row.name for part in asked.only or [""])]
    if not rows:
        sys.exit(f"no row's name holds {' or '.join(asked.only)}")
    command = ["bench.gpu_bench", "--device", asked.device, "--budget", str(asked.budget)]
    command += ["--tiny"] if asked.tiny else []
    began, now = time.monotonic(), datetime.now(UTC)
    report: dict[str, Any] = {
        "benchmark": page.BENCHMARK,
        "at": now.isoformat(timespec="seconds"),
        "device": here.name,
        "software": _software(),
        "roofline": _fields(H200),
        "roofline_measured": False,
        "rows": {},
    }
    roofline = H200
    for name, result in supervise(
        command, [ROOFLINE, *rows], piece_timeout_s=ROW_TIMEOUT_S, budget_s=asked.budget
    ):
        if name != ROOFLINE:
            report["rows"][name] = result
            report["seconds"] = round(time.monotonic() - began, 1)
            print(_line(name, result, roofline, asked.tiny), flush=True)
            # After every row: whoever ends this early keeps what was measured.
            _record(report, now, asked.out, keep=not asked.tiny)
            continue
        if "error" in result:
            print(f"roofline not measured, that of an H200 is taken: {result['error']}")
        else:
            roofline = Roofline(**{field: result[field] for field in _fields(H200)})
            report |= {"roofline": _fields(roofline), "roofline_measured": True}
        print(f"{here.name}: {_roofline_text(roofline)}\n{HEADING}", flush=True)
    results = report["rows"]
    failed = sum("error" in result for result in results.values())
    absent = sum("lacking" in result for result in results.values())
    print(f"{len(results)} rows, {failed} failed, {absent} not built, {report['seconds']} s")
    sys.exit(1 if failed or not report["roofline_measured"] else 0)


def _fields(roofline: Roofline) -> dict[str, float]:
    return {name: getattr(roofline, name) for name in Roofline.__slots__}


def _roofline_text(roofline: Roofline) -> str:
    return (
        f"copy {shown(roofline.bytes_per_s, 'TB/s')}, bf16 {shown(roofline.bf16_flops, 'TFLOP/s')}"
        f", fp8 {shown(roofline.fp8_flops, 'TFLOP/s')}"
    )


def _record(report: dict[str, Any], now: datetime, out: Path | None, *, keep: bool) -> None:
    """A tiny run is written where it was asked to, and its figures are on no page."""
    if out is None and not keep:
        return
    folder = out or page.RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    # One device has one name, here and for the tuned launch parameters.
    from engine.kernels.tuning import device_slug

    path = folder / f"{now:%Y-%m-%d}-{device_slug(report['device'])}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    if keep:
        page.write(report, page.PAGE if out is None else out / "gpu.md")


if __name__ == "__main__":
    main()
