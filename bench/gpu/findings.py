"""Describes what a check found: an error beside its limit, for each of its cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.gpu.place import Place

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""Relative, in the L2 norm: some roundings of what is stored, the sums being float32."""


class Finding(NamedTuple):
    case: str
    error: float
    limit: float
    """The largest error that is right; 0 for what must be equal, bit for bit."""

    @property
    def right(self) -> bool:
        return self.error <= self.limit  # not a number is not


class Lacking(Exception):
    """An error that says that what is to be checked is not built; the text says what."""


Check = Callable[[Place], Iterator[Finding]]


def relative(found: Tensor, exact: Tensor) -> float:
    """Return the error relative to float64 `exact`; not a number where anything was left
    unwritten.
    """
    assert found.shape == exact.shape, f"{tuple(found.shape)} is not {tuple(exact.shape)}"
    return float((found.double() - exact).norm() / exact.norm())


def differing(found: Tensor, wanted: Tensor) -> float:
    """How many numbers differ in any bit."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    size = found.element_size()
    a, b = (tensor.contiguous().view(torch.uint8).view(-1, size) for tensor in (found, wanted))
    return float((a != b).any(dim=1).sum())


def poison(tensor: Tensor) -> Tensor:
    """Filled with what is not a number, or, being integers, is beyond any index."""
    if tensor.dtype.is_floating_point and tensor.element_size() > 1:
        return tensor.fill_(math.nan)
    tensor.view(torch.uint8).fill_(0x7F)  # not a number in float8
    return tensor


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that wrappers take for their results begins as `poison`."""
    makers = (Tensor.new_empty, torch.empty, torch.empty_like)

    def poisoning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **options: Any) -> Tensor:
            tensor = make(*args, **options)
            if tensor.numel() and tensor.device.type != "meta":
                poison(tensor)
            return tensor

        return made

    new_empty, empty, empty_like = (poisoning(make) for make in makers)
    Tensor.new_empty, torch.empty, torch.empty_like = new_empty, empty, empty_like  # type: ignore
    try:
        yield
    finally:
        Tensor.new_empty, torch.empty, torch.empty_like = makers  # type: ignore


def summary(findings: Iterable[Finding]) -> dict[str, Any]:
    """Return the summary of one check: how many cases, the one nearest to its limit, and those that
    are wrong. A check that finds nothing has checked nothing, and that is an error.
    """
    every = list(findings)
    if not every:
        return {"error": "no case was run"}
    # Exact ones have no room between error and limit: none of them is near unless it is wrong.
    worst = max(every, key=_nearness)
    wrong = [finding for finding in every if not finding.right]
    found: dict[str, Any] = {
        "cases": len(every),
        "worst": worst.case,
        "error_found": worst.error,
        "limit": worst.limit,
        "wrong": [f"{f.case}: {f.error:.3g} > {f.limit:.3g}" for f in wrong],
    }
    if wrong:
        found["error"] = f"{len(wrong)} of {len(every)} cases wrong"
    return found


def _nearness(finding: Finding) -> float:
    if not finding.right:
        return math.inf
    return finding.error / finding.limit if finding.limit else 0.0
