"""Read what the Triton kernels take of a GPU, compiled ahead of time: no GPU is needed.

    python -m bench.kernel_resources                     # all kernels, recorded in bench/results/
    python -m bench.kernel_resources --module engine.kernels.pointwise.swiglu_triton --capability 90

With --module nothing is recorded; the JSON goes to standard output. Knows no kernel by name.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from typing import Any

from bench.record import RESULTS
from engine.kernels import aot

CAPABILITIES = (90, 80)
_TILE_IS_HOPPERS = (
    "at most 64 bytes, with the tile that suits wgmma's registers; a table of Ampere's own may "
    "choose another"
)
ALLOWED_SPILLS: dict[str, str] = {
    "sm_80 prefill-g4-d128-w4096-bf16-bf16": _TILE_IS_HOPPERS,
    "sm_80 prefill-g7-d128-w0-bf16-bf16": _TILE_IS_HOPPERS,
    "sm_80 prefill-g4-d256-w0-bf16-bf16-deterministic": _TILE_IS_HOPPERS,
}
"""Target and case -> why its spills are worth it. Every other case must have none."""


def measure(module: str, capability: int) -> dict[str, dict[str, Any]]:
    """Case -> resources, of every case that `capability` can run."""
    return {
        case.name: aot.compile_case(case, capability)._asdict()
        for case in aot.cases(module)
        if case.runs_on(capability)
    }


def spilled(found: dict[str, dict[str, Any]], capability: int) -> list[str]:
    """Cases that spill and may not, with their target."""
    named = {f"sm_{capability} {name}": used["spill_bytes"] for name, used in found.items()}
    return [name for name, size in named.items() if size and name not in ALLOWED_SPILLS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--module", help="only this one, to standard output")
    parser.add_argument("--capability", type=int, choices=CAPABILITIES)
    asked = parser.parse_args()
    capabilities = [asked.capability] if asked.capability else list(CAPABILITIES)
    if asked.module:
        print(json.dumps({sm: measure(asked.module, sm) for sm in capabilities}))
        return
    kernels: dict[str, dict[str, Any]] = {}
    bad: list[str] = []
    for sm in capabilities:
        kernels[f"sm_{sm}"] = {}
        for module in aot.modules():
            found = measure(module, sm)
            kernels[f"sm_{sm}"] |= found
            bad += spilled(found, sm)
            for name, used in found.items():
                print(f"sm_{sm}  {name:<56} {' '.join(f'{k}={v}' for k, v in used.items())}")
    result = {"triton": version("triton"), "allowed_spills": ALLOWED_SPILLS, "kernels": kernels}
    (RESULTS / "kernels-aot.json").write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(f"spilled: {', '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    main()
