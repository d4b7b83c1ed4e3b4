"""Read what the Triton kernels take of a GPU, compiled ahead of time: no GPU is needed.

    python -m bench.engine.kernel_resources     # all kernels, recorded in bench/results/
    python -m bench.engine.kernel_resources --module MODULE [--capability 90]

With --module nothing is recorded; the JSON goes to standard output. Knows no kernel by name.

The record says of which source it is: the tests compile again what has changed since.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.tools.record import RESULTS
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

ROOT = Path(__file__).resolve().parents[2]
RECORD = RESULTS / "kernels-aot.json"
PACKAGE = "engine.kernels"


def path_of(module: str) -> Path:
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


def kernel_imports(tree: ast.Module) -> Iterator[str]:
    """Yield the modules of `engine.kernels` that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{PACKAGE}."):
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                yield name if path_of(name).exists() else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith(f"{PACKAGE}."))


def is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def source_digest(module: str) -> str:
    """Return a digest of a module and of what it imports of `engine.kernels`, directly or not.
    Comments and docstrings do not count: nobody compiles them."""
    trees: dict[str, ast.Module] = {}
    wanted = [module]
    while wanted:
        name = wanted.pop()
        if name in trees or not path_of(name).exists():
            continue
        trees[name] = ast.parse(path_of(name).read_text())
        wanted += kernel_imports(trees[name])
    digest = hashlib.sha256()
    for name, tree in sorted(trees.items()):
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                node.body = [each for each in node.body if not is_text(each)]
        digest.update(f"{name} {ast.dump(tree)}\n".encode())
    return digest.hexdigest()[:16]


def recorded(module: str) -> dict[str, dict[str, Any]] | None:
    """Return by capability what the record says of a module's cases. None: it is the record of
    another source, or of another compiler."""
    record = json.loads(RECORD.read_text())
    if record["triton"] != version("triton"):
        return None
    if record["sources"].get(module) != source_digest(module):
        return None
    names = {case.name for case in aot.cases(module)}
    return {
        str(sm): {k: v for k, v in record["kernels"][f"sm_{sm}"].items() if k in names}
        for sm in CAPABILITIES
    }


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
    result = {
        "triton": version("triton"),
        "sources": {module: source_digest(module) for module in aot.modules()},
        "allowed_spills": ALLOWED_SPILLS,
        "kernels": kernels,
    }
    RECORD.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(f"spilled: {', '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    main()
