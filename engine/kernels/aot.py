"""Compiling the Triton kernels for a GPU that is not there, and reading what they will use of it.

Every `<operation>_triton.py` lists in `AOT` the configurations that are served. Knows no kernel by
name. Works only in a process where the interpreter is off.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

WARP_SIZE = 32
FP8_CAPABILITY = 89
"""The first whose instructions know e4m3."""


class AotCase(NamedTuple):
    """One kernel as one served configuration launches it."""

    name: str
    kernel: Any
    signature: dict[str, str]
    """Every other argument by name, in any order: "*fp16", "*i32", "i32", "i64" or "fp32". Pointers
    count as aligned to 16 bytes, as torch's are; "i32:16" is an integer divisible by 16."""
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    options: dict[str, Any] | None = None
    """Further compiler options, as a launch takes them."""

    @classmethod
    def launched(
        cls,
        name: str,
        kernel: Any,
        signature: dict[str, str],
        constexprs: dict[str, Any],
        config: dict[str, int],
    ) -> AotCase:
        """With a configuration as `tuning.launch_config` gives it: blocks, warps and stages."""
        blocks = {key: size for key, size in config.items() if not key.startswith("num_")}
        constexprs = constexprs | blocks
        return cls(name, kernel, signature, constexprs, config["num_warps"], config["num_stages"])

    def arguments(self) -> dict[str, str]:
        """As the compiler wants them: all, in the kernel's order."""
        return {
            name: "constexpr" if name in self.constexprs else self.signature[name]
            for name in self.kernel.arg_names
        }

    def runs_on(self, capability: int) -> bool:
        needs_fp8 = any("fp8e4nv" in kind for kind in self.signature.values())
        return capability >= FP8_CAPABILITY or not needs_fp8


class Resources(NamedTuple):
    """The resources of one compiled kernel; all per thread but `shared_bytes`."""

    registers: int
    spill_bytes: int
    """The stack frame: our kernels keep no arrays, so what lies there was spilled."""
    shared_bytes: int
    """The dynamic shared memory of a program."""
    matrix_unit: str
    """"wgmma", "mma" or "none": a matrix kernel for Hopper that says "mma" is on the slow path."""


def modules() -> list[str]:
    """Names of all modules that hold Triton kernels."""
    here = Path(__file__).parent
    return sorted(
        ".".join(("engine.kernels", *path.relative_to(here).with_suffix("").parts))
        for path in here.glob("*/*triton*.py")
        # A plan of kernels that stand elsewhere has none itself.
        if "@triton.jit" in path.read_text()
    )


def cases(module: str) -> list[AotCase]:
    """The served configurations of one module's kernels."""
    listed: list[AotCase] = importlib.import_module(module).AOT
    return listed


def compile_case(case: AotCase, capability: int) -> Resources:
    """Compile for `capability` (90 is Hopper). Raises what Triton raises when it cannot."""
    import triton
    from triton.backends.compiler import GPUTarget

    arguments = case.arguments()
    signature = {name: kind.split(":")[0] for name, kind in arguments.items()}
    aligned = [kind.startswith("*") or kind.endswith(":16") for kind in arguments.values()]
    source = triton.compiler.ASTSource(
        fn=case.kernel,
        signature=signature,
        constexprs=case.constexprs,
        attrs={(i,): [["tt.divisibility", 16]] for i, yes in enumerate(aligned) if yes},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, **(case.options or {})}
    target = GPUTarget("cuda", capability, WARP_SIZE)
    compiled = triton.compile(source, target=target, options=options)
    ptx = compiled.asm["ptx"]
    unit = next((unit for unit in ("wgmma", "mma") if f"{unit}." in ptx), "none")
    registers, stack = _registers_and_stack(compiled.asm["cubin"])
    return Resources(registers, stack, compiled.metadata.shared, unit)


def _registers_and_stack(cubin: bytes) -> tuple[int, int]:
    import triton

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        report = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found is not None, report
    return int(found.group(1)), int(found.group(2))
