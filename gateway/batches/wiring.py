"""Opens batches for one process; what is opened is pushed on the caller's stack."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial

from sqlalchemy.ext.asyncio import AsyncEngine

from billing.ingestion.shipper import OnBooked
from gateway.batches.endpoints import (
    Endpoint,
    ask_response,
    ask_surface,
    in_anthropic_shape,
)
from gateway.batches.runner import BatchRunner
from gateway.batches.states import MESSAGES as MESSAGES_PATH
from gateway.batches.validation import InputBounds
from gateway.files.store import FileStore
from gateway.inference.generate import Desk
from gateway.responses.wiring import Responses
from gateway.routes.anthropic.messages import MESSAGES
from gateway.routes.openai.batches import SURFACES
from gateway.routes.openai.responses import RESPONSES, to_own_face
from gateway.settings.load import Settings
from gateway.telemetry import Telemetry


def open_batches(
    settings: Settings,
    stack: AsyncExitStack,
    desk: Desk,
    responses: Responses,
    telemetry: Telemetry,
    db: AsyncEngine,
    system_db: AsyncEngine,
    files: FileStore,
    on_booked: OnBooked,
) -> BatchRunner:
    runner = BatchRunner(
        desk=desk,
        telemetry=telemetry,
        db=db,
        system_db=system_db,
        files=files,
        bounds=InputBounds(
            max_lines=settings.max_batch_lines,
            max_file_bytes=settings.max_batch_bytes,
            max_line_bytes=settings.max_body_bytes,
        ),
        endpoints=endpoints_of(desk, responses),
        on_booked=on_booked,
        max_running=settings.batch_concurrency,
    )
    runner.start()
    stack.push_async_callback(runner.close)
    return runner


def endpoints_of(desk: Desk, responses: Responses) -> Mapping[str, Endpoint]:
    """Return the endpoints by their paths."""
    respond = Endpoint(to_call=partial(ask_response, desk, responses), to_face=to_own_face)
    plain = {
        path: Endpoint(to_call=partial(ask_surface, desk, surface))
        for path, surface in SURFACES.items()
    }
    messages = Endpoint(to_call=partial(ask_surface, desk, MESSAGES), encode=in_anthropic_shape)
    return {**plain, RESPONSES: respond, MESSAGES_PATH: messages}
