"""Writes lists, calls and denials to the audit log: a digest of arguments, nothing of results.
Entries are written many at a time, after the calls that they are about: a log that is away holds up
calls once MAX_WAITING wait, and a killed worker loses at most what came in WRITE_EVERY_S and one
write."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from foundation.tasks import LogAndContinue, end_tasks
from gateway.audit.log import Actor, AuditRecord, record_all
from gateway.credential_forms import CREDENTIAL
from gateway.db import DATABASE_ERRORS, tenant
from mcp_bridge.caller import Caller
from mcp_bridge.routing.guard import Outcome
from mcp_bridge.trust.call_records import CallRecord, Denial, ReadRecord

log = logging.getLogger(__name__)

MAX_WAITING = 10_000
MAX_BATCH = 200
WRITE_EVERY_S = 0.05
RETRY_S = 1.0
CLOSE_S = 10.0
MAX_NAME_CHARS = 256
SECRET_PARTS = re.compile(r"(//)[^/?#]*@|[?#].*", re.DOTALL)
"""The parts of a URI that may hold a secret: user and password, and the query with all behind it.
"""
SampleOutcome = Literal["done", "refused", "failed", "left"]
"""The outcome of a server's sampling request to one of our models. `refused`: by the caller's
limits."""


class Entry(msgspec.Struct, frozen=True):
    caller: Caller
    action: str
    target: str
    after: dict[str, Any]


class AuditRecords:
    """The records of the bridge, between `start` and `close`."""

    def __init__(self, db: AsyncEngine, on_denied: Callable[[str, str], None]) -> None:
        """`on_denied` hears of each denial: its server and the reason."""
        self._db, self._on_denied = db, on_denied
        self._waiting: asyncio.Queue[Entry] = asyncio.Queue(MAX_WAITING)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="mcp audit")

    async def close(self) -> None:
        """Write what waits once nobody calls any more, or log that it is lost."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._waiting.join()
        if self._waiting.qsize():
            log.error("mcp: %d entries of the audit log are lost", self._waiting.qsize())
        if self._task is not None:
            await end_tasks(self._task)

    async def listed(
        self, caller: Caller, server: str, method: str, count: int, stale: bool
    ) -> None:
        after = {"method": method, "count": count, "stale": stale}
        await self._waiting.put(Entry(caller, "mcp.listed", server, after))

    async def denied(self, denial: Denial) -> None:
        self._on_denied(denial.server, denial.reason)
        after = {
            **called(denial.method, denial.name),
            "reason": denial.reason,
            "rules": list(denial.rules),
        }
        await self._waiting.put(Entry(denial.caller, "mcp.denied", denial.server, after))

    async def read(self, read: ReadRecord, outcome: Outcome) -> None:
        after = {**called(read.method, read.name), "rules": list(read.rules), "outcome": outcome}
        if read.offer_age_s is not None:
            after |= rechecked(read.offer_age_s)
        await self._waiting.put(Entry(read.caller, "mcp.read", read.server, after))

    async def opened(self, call: CallRecord) -> None:
        """Note a call; it is written together with its outcome."""

    async def closed(self, call: CallRecord, outcome: Outcome) -> None:
        after = {
            "call_id": call.id,
            "tool": masked(call.tool),
            "pin": call.pin,
            "arguments_digest": call.arguments_digest,
            "rules": list(call.rules),
            "approval_id": call.approval_id,
            "continues": call.continues,
            "outcome": outcome,
            **rechecked(call.offer_age_s),
        }
        if call.caller.part_of is not None:
            after["request_id"] = call.caller.part_of
        await self._waiting.put(Entry(call.caller, "mcp.called", call.server, after))

    async def sampled(
        self, caller: Caller, server: str, model: str, request_id: str, outcome: SampleOutcome
    ) -> None:
        after = {"model": model, "request_id": request_id, "outcome": outcome}
        await self._waiting.put(Entry(caller, "mcp.sampled", server, after))

    async def _run(self) -> None:
        log_and_continue = LogAndContinue(log, "mcp: audit not written")
        while True:
            batch = [await self._waiting.get()]
            await asyncio.sleep(WRITE_EVERY_S)
            while len(batch) < MAX_BATCH and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            by_org: dict[str, list[Entry]] = {}
            for entry in batch:
                by_org.setdefault(entry.caller.org_id, []).append(entry)
            for org_id, entries in by_org.items():
                with log_and_continue:
                    await self._write(org_id, entries)
            for _ in batch:
                self._waiting.task_done()

    async def _write(self, org_id: str, entries: list[Entry]) -> None:
        """Write entries in one transaction, again until the database is there."""
        events = [
            AuditRecord(
                actor=actor_of(entry.caller),
                action=entry.action,
                target=entry.target,
                after=entry.after,
                project_id=entry.caller.project_id,
            )
            for entry in entries
        ]
        while True:
            try:
                async with tenant(self._db, org_id) as conn:
                    await record_all(conn, org_id=org_id, events=events)
                return
            except DATABASE_ERRORS as error:
                log.warning("mcp: audit waits for Postgres (%s)", type(error).__name__)
                await asyncio.sleep(RETRY_S)


def called(method: str, name: str) -> dict[str, Any]:
    """Return what a request was about, without the parts of a URI that may be secret."""
    if method == "tools/call":
        return {"tool": masked(name)}
    return {"method": method, "name": masked(SECRET_PARTS.sub(r"\1", name))}


def rechecked(offer_age_s: float | None) -> dict[str, Any]:
    """Return whether a server was asked, for a request itself, if it still offers what is approved;
    and if not, how long before."""
    if offer_age_s is None:
        return {"rechecked": True}
    return {"rechecked": False, "offer_age_ms": round(offer_age_s * 1000)}


def masked(name: str) -> str:
    """Return a tool's name, as a client or a server wrote it, in a form that can be recorded."""
    return "(masked)" if CREDENTIAL.search(name) else name[:MAX_NAME_CHARS]


def actor_of(caller: Caller) -> Actor:
    return Actor(kind="client", id=caller.client, on_behalf_of=caller.subject)
