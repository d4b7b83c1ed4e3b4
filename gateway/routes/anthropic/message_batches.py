"""/v1/messages/batches: many messages in one request, answered within a day. Anthropic's shapes.

The body is taken piece by piece into a file that only its batch is shown: no body is in memory.
Like all batches it runs by its creator's key.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa
from litestar import Response
from litestar.params import FromPath
from litestar.response import Stream
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.batches.batches import (
    MESSAGE_BATCH_ID,
    cancel_message_batch,
    create_batch,
    delete_message_batch,
    get_batch,
    select_batches,
    to_batches,
)
from gateway.batches.results import DEFAULT_EXPIRY_S
from gateway.batches.states import MESSAGES
from gateway.batches.tables import batches as table
from gateway.db import tenant
from gateway.files.files import MESSAGE_BATCH, File, get_file
from gateway.files.uploads import Upload
from gateway.http_errors.table import RequestTooLarge
from gateway.routes.anthropic.messages import messages, names_version
from gateway.routes.shared.access import AuthenticatedRequest, actor_of, project_of, services
from gateway.routes.shared.body import refuse_coded, refuse_other_types
from gateway.routes.shared.conditional import answer
from gateway.routes.shared.generation import TAGS as TAGS_HEADER
from gateway.routes.shared.idempotency import check_may_stay, create_once
from gateway.routes.shared.resource import check_id
from gateway.tenancy.errors import InvalidField, NotAllowed, NotFound
from gateway.wire.anthropic.batched_requests import FIELD, MAX_BODY_BYTES, MAX_REQUESTS, BodyReader
from gateway.wire.anthropic.batches import (
    DeletedMessageBatch,
    MessageBatchesQuery,
    MessageBatchObject,
    MessageBatchPage,
    NewMessageBatch,
    to_message_batch,
)
from gateway.wire.organization.usage import parse_query
from gateway.wire.shared.batch import ENDED, Batch
from gateway.wire.usage.tags import read_tags

BATCHES = "/v1/messages/batches"
BATCH = BATCHES + "/{message_batch_id:str}"
RESULTS = "/results"
JSON_LINES = "application/x-jsonl"
READ_AT_ONCE_BYTES = 16 * 1024
"""A piece of a body full of small requests blocks the event loop for some milliseconds."""
KEPT_FOR = timedelta(seconds=DEFAULT_EXPIRY_S)


@messages.post(
    BATCHES,
    "Create a batch of messages",
    body=NewMessageBatch,
    answer=MessageBatchObject,
    headers=(TAGS_HEADER,),
    idempotent=True,
    options={"request_max_body_size": None},  # as large as a batch may be, counted as it comes
)
async def create(request: AuthenticatedRequest) -> Response[bytes]:
    names_version(request)
    found, principal = services(request), request.user
    if principal.kind != "key":
        raise NotAllowed(FIELD, "a batch is created with an API key: it outlives a token")
    check_may_stay(principal, FIELD)
    refuse_coded(request.scope["headers"])
    refuse_other_types(request.scope["headers"])
    tags = read_tags(request.scope["headers"])
    upload = await begin(request)
    try:
        reader = BodyReader(
            max_requests=min(MAX_REQUESTS, found.batches.bounds.max_lines),
            max_request_bytes=found.batches.bounds.max_line_bytes,
        )
        asked = await take(request.stream(), reader, upload, max_body_bytes(request))
        await upload.close()

        async def make(conn: AsyncConnection) -> MessageBatchObject:
            file = await upload.finish(conn, purpose=MESSAGE_BATCH, filename="requests.jsonl")
            made = await create_batch(
                conn,
                found.batches.cipher,
                **project_of(request),
                key_id=principal.key_id,
                endpoint=MESSAGES,
                input_file_id=file.id,
                num_total=reader.num_requests,
                tags=tags,
                actor=actor_of(request),
            )
            return to_object(request, made)

        once = await create_once(request, asked, make)
    except BaseException:
        await upload.give_up()
        raise
    if not once.is_new:
        await upload.give_up()
    found.batches.wake()
    return once.response


def max_body_bytes(request: AuthenticatedRequest) -> int:
    found = services(request)
    most = (found.batches.bounds.max_file_bytes, found.files.max_file_bytes)
    return min(MAX_BODY_BYTES, *most)


async def begin(request: AuthenticatedRequest) -> Upload:
    """Begin with the most room that such a body may need: a line is no longer than what it came in.
    Raises: RequestTooLarge, InvalidField."""
    files, principal = services(request).files, request.user
    most, length = max_body_bytes(request), request.content_length
    if length is not None and length > most:
        raise RequestTooLarge(most)
    room = most if length is None else length
    try:
        return await files.begin(principal.org_id, principal.project_id, most_bytes=room)
    except InvalidField as error:
        raise InvalidField(FIELD, error.message) from error


async def take(
    pieces: AsyncIterator[bytes], reader: BodyReader, upload: Upload, most_bytes: int
) -> bytes:
    """Read the body into the file and return a SHA-256 of all.

    Raises: BadField, RequestTooLarge, and what a file store raises.
    """
    size_bytes, digest = 0, hashlib.sha256()
    async for piece in pieces:
        size_bytes += len(piece)
        if size_bytes > most_bytes:
            raise RequestTooLarge(most_bytes)
        for begin in range(0, len(piece), READ_AT_ONCE_BYTES):
            part = piece[begin : begin + READ_AT_ONCE_BYTES]
            digest.update(part)
            lines = b"".join(line + b"\n" for line in reader.feed(part))
            if lines:
                await upload.write(lines)
            await asyncio.sleep(0)
    reader.end()
    return digest.digest()


@messages.get(
    BATCHES,
    "List the batches of messages of the project, the newest first",
    query=MessageBatchesQuery,
    answer=MessageBatchPage,
)
async def list_(request: AuthenticatedRequest) -> Response[bytes]:
    names_version(request)
    query = parse_query(request.url.query, MessageBatchesQuery)
    listed = select_batches(**project_of(request), shape="anthropic")
    backwards = query.before_id is not None and query.after_id is None
    if query.after_id is not None:
        listed = listed.where(table.c.id < query.after_id)
    if query.before_id is not None:
        listed = listed.where(table.c.id > query.before_id)
    order: sa.ColumnElement[str] = table.c.id.asc() if backwards else table.c.id.desc()
    async with tenant(services(request).db, request.user.org_id) as conn:
        rows = await conn.execute(listed.order_by(order).limit(query.limit + 1))
        found = to_batches(rows)
    data = [to_object(request, each) for each in found[: query.limit]]
    if backwards:
        data.reverse()
    page = MessageBatchPage(
        data=data,
        has_more=len(found) > query.limit,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
    )
    return answer(request, page)


@messages.get(BATCH, "One batch of messages", answer=MessageBatchObject)
async def retrieve(
    request: AuthenticatedRequest, message_batch_id: FromPath[str]
) -> Response[bytes]:
    names_version(request)
    return to_response(request, await find(request, message_batch_id))


@messages.post(
    BATCH + "/cancel",
    "Cancel a batch of messages: what runs ends, nothing more begins",
    answer=MessageBatchObject,
)
async def cancel(request: AuthenticatedRequest, message_batch_id: FromPath[str]) -> Response[bytes]:
    names_version(request)
    async with tenant(services(request).db, request.user.org_id) as conn:
        made = await cancel_message_batch(
            conn, **where(request, message_batch_id), actor=actor_of(request)
        )
    services(request).batches.wake()
    return to_response(request, made)


@messages.delete(
    BATCH, "Delete a batch of messages that has ended, with its results", answer=DeletedMessageBatch
)
async def remove(request: AuthenticatedRequest, message_batch_id: FromPath[str]) -> Response[bytes]:
    names_version(request)
    async with tenant(services(request).db, request.user.org_id) as conn:
        await delete_message_batch(
            conn, **where(request, message_batch_id), actor=actor_of(request)
        )
    return answer(request, DeletedMessageBatch(id=message_batch_id))


@messages.get(
    BATCH + RESULTS,
    "What has become of each request of a batch that has ended, in lines of JSON",
    said={200: {JSON_LINES: str}},
)
async def results(request: AuthenticatedRequest, message_batch_id: FromPath[str]) -> Stream:
    names_version(request)
    file = await results_of(request, await find(request, message_batch_id))
    headers = {"content-length": str(file.size_bytes), "x-content-type-options": "nosniff"}
    pieces = await services(request).files.open(file)
    return Stream(pieces, media_type=JSON_LINES, headers=headers)


async def results_of(request: AuthenticatedRequest, batch: Batch) -> File:
    """Raises: InvalidField, NotFound."""
    if batch.status not in ENDED:
        raise InvalidField(MESSAGE_BATCH_ID, "the batch has not ended, and has no results yet")
    if batch.output_file_id is None:
        raise NotFound(MESSAGE_BATCH_ID, f"no results of {batch.id!r}")
    async with tenant(services(request).db, request.user.org_id) as conn:
        return await get_file(
            conn,
            **project_of(request),
            file_id=batch.output_file_id,
            field=MESSAGE_BATCH_ID,
            is_inner=True,
        )


async def find(request: AuthenticatedRequest, batch_id: str) -> Batch:
    """Raises: NotFound."""
    async with tenant(services(request).db, request.user.org_id) as conn:
        return await get_batch(conn, **where(request, batch_id), shape="anthropic")


def where(request: AuthenticatedRequest, batch_id: str) -> dict[str, Any]:
    """Raises: NotFound."""
    return {**project_of(request), "batch_id": check_id(MESSAGE_BATCH_ID, batch_id)}


def to_object(request: AuthenticatedRequest, batch: Batch) -> MessageBatchObject:
    url = f"{services(request).authority.issuer}{BATCHES}/{batch.id}{RESULTS}"
    return to_message_batch(batch, results_url=url, kept_for=KEPT_FOR, now=datetime.now(tz=UTC))


def to_response(request: AuthenticatedRequest, batch: Batch) -> Response[bytes]:
    return answer(request, to_object(request, batch))


routes = [create, list_, retrieve, cancel, remove, results]
