"""Chooses which implementation of an operation runs: its Triton kernel or its torch reference.

Knows no operation.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec

import torch


def uses_triton(device: torch.device) -> bool:
    """On CUDA where Triton is installed; on a CPU while Triton's interpreter is on, so that the
    whole engine can be tested without a GPU."""
    if device.type == "cuda":
        return _installed()
    return interpreted()


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter in this process. Whoever turned it on has
    imported Triton: an engine on a plain CPU never pays for that."""
    triton = sys.modules.get("triton")
    return triton is not None and bool(triton.knobs.runtime.interpret)


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
