"""Finds oneDNN's microkernel in torch: a product of a few dozen rows and columns, on one thread.

It reads the panels that our own tiles read, so nothing is stored twice; it is called by its
address, so a recorded program can hold it; and it is compiled for the processor's best instructions
when it is first called with a size: AMX where there is any.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from engine.kernels.choice.machine import this_machine

LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
PRODUCT = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"
"""at::native::cpublas::brgemm(M, N, K, ld_a, ld_b, ld_c, add_C, BFloat16 const* A, B, float* C,
is_vnni): C[M, N] (+)= A[M, K] B[K, N], two rows of B side by side."""
RELEASE = "_ZN2at6native7cpublas14brgemm_releaseEb"
"""at::native::cpublas::brgemm_release(is_vnni): the thread gives its tiles back."""
NEEDED = frozenset({"avx512_bf16", "amx_bf16"})
"""With neither feature the function throws, which no kernel may let it do."""


class Microkernel(NamedTuple):
    """Addresses of its two functions."""

    product: int
    release: int


@cache
def microkernel() -> Microkernel | None:
    """Return the microkernel on bfloat16; None where torch has none, or not for this processor. In
    float32 our own tiles were never slower (1.0-1.3 times as fast), so it is not asked there."""
    if NEEDED.isdisjoint(this_machine().features) or not torch.backends.mkldnn.is_available():
        return None
    try:
        library = ctypes.CDLL(str(LIBRARY))  # loaded by torch: no second instance
        found = [getattr(library, name) for name in (PRODUCT, RELEASE)]
    except (OSError, AttributeError):
        return None
    product, release = (ctypes.cast(each, ctypes.c_void_p).value for each in found)
    return Microkernel(product, release) if product and release else None
