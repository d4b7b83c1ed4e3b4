"""Which implementation of an operation runs: its Triton kernel or its torch reference.

Above: every `kernels/<op>.py` that has a kernel beside it. Below: torch, and whether Triton is
there. Knows no operation.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec

import torch


def uses_triton(device: torch.device) -> bool:
    """CUDA devices where Triton is installed; and the CPU while Triton's interpreter is on, so that
    the whole engine can be tested without a GPU."""
    if device.type == "cuda":
        return _installed()
    # Whoever turned the interpreter on has imported Triton: a plain CPU engine never pays for it.
    triton = sys.modules.get("triton")
    return triton is not None and bool(triton.knobs.runtime.interpret)


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
