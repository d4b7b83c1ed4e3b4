"""Notes in the log of requests what became of responses whose worker has gone: nobody else knows of
them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sqlalchemy.ext.asyncio import AsyncConnection

from billing.reports.request_record import find_record
from foundation.request_context import LogContext
from gateway.request_log.answers import REQUEST_PREFIX, NotedAnswer, RequestOwner, sum_up, to_row
from gateway.request_log.rows import RequestRow
from gateway.request_log.writer import RequestLog
from gateway.responses.kept import AskedRequest, ResponseOwner
from gateway.wire.openai_responses.answer import ResponseError
from gateway.wire.surfaces import RESPONSES

LOST_STATUS = 500
LOST = ResponseError("server_error", "The gateway that worked on this response has stopped.")


class LostResponse(NamedTuple):
    """A response that was given up, and who asked for it."""

    owner: ResponseOwner
    asked: AskedRequest


class LostResponseLog:
    """Writes their rows. `label`: the name under which a model is counted."""

    def __init__(self, log: RequestLog, label: Callable[[str], str]) -> None:
        self._log, self._label = log, label

    async def note(self, conn: AsyncConnection, lost: Sequence[LostResponse]) -> None:
        """Write rows with what the books have of each by now, in the transaction that gives them
        up. `conn`: of a role that sees the ledger."""
        rows = [await self._to_row(conn, each) for each in lost]
        await self._log.keep_days_of(rows)
        await self._log.write_within(conn, rows)

    async def _to_row(self, conn: AsyncConnection, lost: LostResponse) -> RequestRow:
        asked, owner = lost.asked, lost.owner
        made_at = int(asked.request_id.removeprefix(REQUEST_PREFIX)[:12], 16) / 1000
        record = await find_record(conn, owner.org_id, asked.request_id, made_at)
        events = () if record is None else record.events
        answer = NotedAnswer(
            ended_at=(now := time.time()),
            duration_s=max(0.0, now - made_at),
            method="POST",
            route=RESPONSES,
            status=str(LOST_STATUS),
            context=LogContext(asked.request_id, own_trace=asked.trace),
            model=asked.model,
            principal=None,
            meter=None,
            client=None,
            kind="background",
            error_code=LOST.code,
        )
        row_owner = RequestOwner(
            org=owner.org_id,
            project=owner.project_id,
            key=asked.key,
            model=self._label(asked.model),
            lane=asked.lane,
            tags=asked.tags,
        )
        used = sum_up(each for each in events if each.kind == "usage")
        return to_row(row_owner, answer, *used)
