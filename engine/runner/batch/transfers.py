"""Copies between host and device that nobody waits for until they are needed.

Knows no steps.

What was sampled leaves on a stream of its own, so that waiting for it does not mean waiting for the
next step, which may be queued behind it already.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Download:
    """Tensors on their way to the host."""

    copies: tuple[Tensor, ...]
    sources: tuple[Tensor, ...]
    """Held until the copies are read: their memory must not be given to others before."""
    done: torch.cuda.Event | None

    def wait(self) -> tuple[Tensor, ...]:
        """The copies, when they are there; nothing else is waited for."""
        if self.done is not None:
            self.done.synchronize()
        return self.copies


class Transfers:
    """The transfers of one device. Calls come from one thread, on its current stream."""

    def __init__(self, device: torch.device) -> None:
        self.asynchronous = device.type == "cuda"
        self._device = device
        self._downloads = torch.cuda.Stream(device) if self.asynchronous else None
        self._last: torch.cuda.Event | None = None

    def host_buffer(self, num_bytes: int) -> Tensor:
        """uint8, pinned where that makes copies asynchronous."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.asynchronous)

    def event(self) -> torch.cuda.Event | None:
        """Return an event of what the current stream has been given so far."""
        if not self.asynchronous:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def download(self, *tensors: Tensor) -> Download:
        """Copy tensors as they will be when the current stream has come here. Work queued later may
        overwrite them after `let_downloads_pass`."""
        computed = self.event()
        if computed is None or self._downloads is None:
            return Download(tuple(tensor.clone() for tensor in tensors), tensors, None)
        with torch.cuda.stream(self._downloads):
            self._downloads.wait_event(computed)
            copies = tuple(
                torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(
                    tensor, non_blocking=True
                )
                for tensor in tensors
            )
            self._last = self.event()
        return Download(copies, tensors, self._last)

    def let_downloads_pass(self) -> None:
        """Let the current stream, not the host, wait for the copies that were begun."""
        if self._last is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last)
