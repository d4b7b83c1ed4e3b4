"""Opens batches for one process; what is opened is pushed on the caller's stack."""

from __future__ import annotations

from collections.abc import Mapping

from billing.ingestion.shipper import OnBooked
from gateway.batches.endpoints import (
    LineEndpoint,
)
from gateway.batches.runner import BatchRunner
from gateway.batches.validation import InputBounds
from gateway.files.store import FileStore
from gateway.inference.services import GenerationServices
from gateway.resources import Resources
from gateway.settings.load import Settings


def open_batches(
    settings: Settings,
    resources: Resources,
    services: GenerationServices,
    files: FileStore,
    on_booked: OnBooked,
    endpoints: Mapping[str, LineEndpoint],
) -> BatchRunner:
    """Start the runner of batches. `endpoints`: what a line may ask, by its path."""
    runner = BatchRunner(
        services=services,
        telemetry=resources.telemetry,
        db=resources.db,
        system_db=resources.system_db,
        files=files,
        bounds=InputBounds(
            max_lines=settings.max_batch_lines,
            max_file_bytes=settings.max_batch_bytes,
            max_line_bytes=settings.max_body_bytes,
        ),
        endpoints=endpoints,
        on_booked=on_booked,
        max_running=settings.batch_concurrency,
    )
    runner.start()
    resources.stack.push_async_callback(runner.close)
    return runner
