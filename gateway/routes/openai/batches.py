"""/v1/batches: many requests in a file, answered within a day. OpenAI's shapes.

A batch runs by its creator's key, with what that may, costs and is limited to when each request
runs; so it is created with a key, not with a token, which it would outlive.
"""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Response
from litestar.params import FromPath
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.batches.batches import (
    cancel_batch,
    create_batch,
    get_batch,
    select_batches,
    to_batches,
)
from gateway.batches.sealing import opened
from gateway.batches.tables import batches as batches_table
from gateway.db import tenant
from gateway.principal import SCOPE_INFERENCE
from gateway.request_errors import BadField
from gateway.routes.shared.access import AuthenticatedRequest, actor_of, needs, project_of, services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.conditional import answer
from gateway.routes.shared.generation import TAGS as TAGS_HEADER
from gateway.routes.shared.idempotency import check_may_stay, create_once
from gateway.routes.shared.media_types import JSON
from gateway.routes.shared.operations import ErrorEnvelope, RouteGroup
from gateway.routes.shared.pages import Listing, keyset, to_listing
from gateway.routes.shared.resource import check_id
from gateway.tenancy.errors import NotAllowed
from gateway.wire.openai.batches import BatchesQuery, BatchObject, NewBatch, to_batch_object
from gateway.wire.organization.usage import parse_query
from gateway.wire.shared.batch import Batch
from gateway.wire.shared.refusals import decode_kept
from gateway.wire.surfaces import RESPONSES, SURFACES
from gateway.wire.usage.tags import read_tags

BATCHES = "/v1/batches"
BATCH = BATCHES + "/{batch_id:str}"
batches = RouteGroup(tag="Batches", opt=needs(SCOPE_INFERENCE))
ENDPOINTS = (*SURFACES, RESPONSES)
_decoder = msgspec.json.Decoder(NewBatch)


def to_response(request: AuthenticatedRequest, batch: Batch) -> Response[bytes]:
    return answer(request, to_batch_object(opened(services(request).batches.cipher, batch)))


@batches.post(
    BATCHES,
    "Create a batch",
    body=NewBatch,
    answer=BatchObject,
    headers=(TAGS_HEADER,),
    idempotent=True,
    said={404: {JSON: ErrorEnvelope}},
)
async def create(request: AuthenticatedRequest) -> Response[bytes]:
    principal = request.user
    if principal.kind != "key":
        raise NotAllowed("input_file_id", "a batch is created with an API key: it outlives a token")
    check_may_stay(principal, "input_file_id")
    tags = read_tags(request.scope["headers"])
    body = await plain_body(request)
    wanted = decode_kept(_decoder, body)
    if wanted.endpoint not in ENDPOINTS:
        expected = f"expected one of {', '.join(sorted(ENDPOINTS))}"
        raise BadField(f"Invalid value for 'endpoint': {expected}.", param="endpoint")

    cipher = services(request).batches.cipher

    async def make(conn: AsyncConnection) -> BatchObject:
        made = await create_batch(
            conn,
            cipher,
            **project_of(request),
            key_id=principal.key_id,
            endpoint=wanted.endpoint,
            input_file_id=wanted.input_file_id,
            completion_window=wanted.completion_window,
            metadata=wanted.metadata,
            output_expires_after_s=wanted.output_expires_after_s,
            tags=tags,
            actor=actor_of(request),
        )
        return to_batch_object(opened(cipher, made))

    made = await create_once(request, body, make)
    services(request).batches.wake()
    return made.response


@batches.get(
    BATCHES,
    "List the batches of the project, the newest first",
    query=BatchesQuery,
    answer=Listing[BatchObject],
)
async def list_(request: AuthenticatedRequest) -> Response[bytes]:
    query = parse_query(request.url.query, BatchesQuery)
    listed = select_batches(**project_of(request))
    async with tenant(services(request).db, request.user.org_id) as conn:
        rows = await conn.execute(keyset(listed, batches_table.c.id, query))
        cipher = services(request).batches.cipher
        found = [to_batch_object(opened(cipher, each)) for each in to_batches(rows)]
    return answer(request, to_listing(found, query))


@batches.get(BATCH, "One batch", answer=BatchObject)
async def retrieve(request: AuthenticatedRequest, batch_id: FromPath[str]) -> Response[bytes]:
    async with tenant(services(request).db, request.user.org_id) as conn:
        found = await get_batch(conn, **_where(request, batch_id))
    return to_response(request, found)


@batches.post(
    BATCH + "/cancel",
    "Cancel a batch: what runs ends, nothing more begins",
    answer=BatchObject,
    said={409: {JSON: ErrorEnvelope}},
)
async def cancel(request: AuthenticatedRequest, batch_id: FromPath[str]) -> Response[bytes]:
    async with tenant(services(request).db, request.user.org_id) as conn:
        made = await cancel_batch(conn, **_where(request, batch_id), actor=actor_of(request))
    services(request).batches.wake()
    return to_response(request, made)


def _where(request: AuthenticatedRequest, batch_id: str) -> dict[str, Any]:
    return {**project_of(request), "batch_id": check_id("batch_id", batch_id)}


routes = [create, list_, retrieve, cancel]
