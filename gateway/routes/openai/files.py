"""/v1/files: uploaded, listed, shown, read, deleted. OpenAI's shapes, not Anthropic's.

Bytes go through piece by piece, in and out: no file is in memory. A file is its project's: whoever
has a key of that may read and delete it.
"""

from __future__ import annotations

import hashlib
from typing import Any
from urllib.parse import quote

import msgspec
from litestar import Response
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.params import FromPath
from litestar.response import Stream
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.db import tenant
from gateway.files.files import File, delete_file, get_file, select_files, to_files
from gateway.files.store import FileStore
from gateway.files.tables import files as files_table
from gateway.files.uploads import FileTooLarge
from gateway.principal import SCOPE_INFERENCE
from gateway.routes.anthropic.messages import VERSION_NAMED
from gateway.routes.shared.access import AuthenticatedRequest, actor_of, needs, project_of, services
from gateway.routes.shared.body import refuse_coded
from gateway.routes.shared.conditional import answer
from gateway.routes.shared.idempotency import check_may_stay, create_once, digest_of_parts
from gateway.routes.shared.media_types import MULTIPART
from gateway.routes.shared.operations import RouteGroup
from gateway.routes.shared.pages import Listing, keyset, to_listing
from gateway.routes.shared.problem import is_anthropics
from gateway.routes.shared.resource import check_id
from gateway.tenancy.errors import NotFound
from gateway.wire.openai.files import (
    FileDeleted,
    FileObject,
    FilesQuery,
    FileUpload,
    read_upload,
    to_file_object,
)
from gateway.wire.organization.usage import parse_query
from gateway.wire.shared.multipart_form import MAX_OVERHEAD_BYTES, boundary_of, read_form

FILES = "/v1/files"
FILE = FILES + "/{file_id:str}"
OCTETS = "application/octet-stream"


async def refuse_anthropics(
    connection: ASGIConnection[Any, Any, Any, Any], _handler: BaseRouteHandler
) -> None:
    """Refuse clients of Anthropic's API, which has other files at these paths. Raises: NotFound."""
    if is_anthropics(connection.scope["headers"]):
        raise NotFound("path", "Anthropic's Files API is not served: send what a file holds")


files = RouteGroup(
    tag="Files",
    opt=needs(SCOPE_INFERENCE),
    headers=(VERSION_NAMED,),
    guards=(refuse_anthropics,),
)


@files.post(
    FILES,
    "Upload a file",
    form=FileUpload,
    form_type=MULTIPART,
    answer=FileObject,
    idempotent=True,
    options={"request_max_body_size": None},  # as large as a file may be, counted as it comes
)
async def create(request: AuthenticatedRequest) -> Response[bytes]:
    check_may_stay(request.user, "file")
    refuse_coded(request.scope["headers"])
    boundary = boundary_of(request.headers.get("content-type", ""))
    found, principal = services(request), request.user
    upload = await found.files.begin(
        principal.org_id, principal.project_id, most_bytes=most_bytes(request, found.files)
    )
    try:
        content = hashlib.sha256()

        async def write(piece: bytes) -> None:
            content.update(piece)
            await upload.write(piece)

        form = await read_form(request.stream(), boundary, write)
        wanted = read_upload(form.fields, form.filename)
        await upload.close()

        async def make(conn: AsyncConnection) -> FileObject:
            made = await upload.finish(
                conn,
                purpose=wanted.purpose,
                filename=wanted.file,
                expires_after_s=wanted.expires_after_s,
            )
            return to_file_object(found.files.opened(made))

        # A form that is sent again has another boundary.
        asked = digest_of_parts(content.digest(), msgspec.json.encode(wanted))
        once = await create_once(request, asked, make)
    except BaseException:
        await upload.give_up()
        raise
    if not once.is_new:
        await upload.give_up()
    return once.response


def most_bytes(request: AuthenticatedRequest, files: FileStore) -> int | None:
    """Return how many bytes a form of that length can hold; None: it does not say. Raises:
    FileTooLarge."""
    length = request.content_length
    if length is None:
        return None
    if length > files.max_file_bytes + MAX_OVERHEAD_BYTES:
        raise FileTooLarge(files.max_file_bytes)
    return min(length, files.max_file_bytes)


@files.get(FILES, "List the files of the project", query=FilesQuery, answer=Listing[FileObject])
async def list_(request: AuthenticatedRequest) -> Response[bytes]:
    query = parse_query(request.url.query, FilesQuery)
    listed = select_files(**project_of(request), purpose=query.purpose)
    async with tenant(services(request).db, request.user.org_id) as conn:
        rows = await conn.execute(keyset(listed, files_table.c.id, query))
        opened = services(request).files.opened
        found = [to_file_object(opened(each)) for each in to_files(rows)]
    return answer(request, to_listing(found, query))


@files.get(FILE, "One file", answer=FileObject)
async def retrieve(request: AuthenticatedRequest, file_id: FromPath[str]) -> Response[bytes]:
    return answer(request, to_file_object(await _find(request, file_id)))


@files.get(FILE + "/content", "What is in a file", said={200: {OCTETS: str}})
async def content(request: AuthenticatedRequest, file_id: FromPath[str]) -> Stream:
    found = await _find(request, file_id)
    pieces = await services(request).files.open(found)
    headers = {
        "content-length": str(found.size_bytes),
        "content-disposition": f"attachment; filename*=UTF-8''{quote(found.filename, safe='')}",
        "x-content-type-options": "nosniff",
    }
    return Stream(pieces, media_type=OCTETS, headers=headers)


@files.delete(FILE, "Delete a file", answer=FileDeleted)
async def remove(request: AuthenticatedRequest, file_id: FromPath[str]) -> Response[bytes]:
    check_id("file_id", file_id)
    async with tenant(services(request).db, request.user.org_id) as conn:
        actor = actor_of(request)
        await delete_file(conn, **project_of(request), file_id=file_id, actor=actor)
    return answer(request, FileDeleted(id=file_id))


async def _find(request: AuthenticatedRequest, file_id: str) -> File:
    """Raises: NotFound."""
    check_id("file_id", file_id)
    async with tenant(services(request).db, request.user.org_id) as conn:
        found = await get_file(conn, **project_of(request), file_id=file_id)
    return services(request).files.opened(found)


routes = [create, list_, retrieve, content, remove]
