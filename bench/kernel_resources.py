"""What the Triton kernels take of a GPU, compiled ahead of time: no GPU is needed.

    python -m bench.kernel_resources                     # all kernels, recorded in bench/results/
    python -m bench.kernel_resources --module engine.kernels.swiglu_triton --capability 90

With --module nothing is recorded; the JSON goes to standard output. Above: nobody; the kernels'
tests run it in a child. Below: `engine.kernels.aot`. Knows no kernel by name.
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
ALLOWED_SPILLS: dict[str, str] = {}
"""Case -> why its spills are worth it. Every other case must have none."""


def measure(module: str, capability: int) -> dict[str, dict[str, Any]]:
    """Case -> resources, of every case that `capability` can run."""
    return {
        case.name: aot.compile_case(case, capability)._asdict()
        for case in aot.cases(module)
        if case.runs_on(capability)
    }


def spilled(found: dict[str, dict[str, Any]]) -> list[str]:
    """Cases that spill and may not."""
    return [
        name for name, used in found.items() if used["spill_bytes"] and name not in ALLOWED_SPILLS
    ]


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
            bad += [f"sm_{sm} {name}" for name in spilled(found)]
            for name, used in found.items():
                print(f"sm_{sm}  {name:<56} {' '.join(f'{k}={v}' for k, v in used.items())}")
    result = {"triton": version("triton"), "allowed_spills": ALLOWED_SPILLS, "kernels": kernels}
    (RESULTS / "kernels-aot.json").write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(f"spilled: {', '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    main()
