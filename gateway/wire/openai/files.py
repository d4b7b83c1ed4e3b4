"""OpenAI's files: what an upload says, what a list is asked for, how a file is shown.

Structs only; names and types are the official SDK's.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gateway.files.files import BATCH, File, Purpose
from gateway.files.uploads import MAX_EXPIRY_S, MIN_EXPIRY_S
from gateway.request_errors import BadField
from gateway.tenancy.pages import Order
from gateway.wire.shared.page_query import PageQuery
from gateway.wire.shared.refusals import to_bad_value
from gateway.wire.shared.resource import view_of

BATCH_EXPIRY_S = 30 * 86_400
"""The default expiry of a file that is uploaded for a batch."""
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
ExpirySeconds = Annotated[int, Meta(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]
Content = Annotated[str, Meta(extra_json_schema={"format": "binary"})]


MAX_PAGE = 10_000


class FilesQuery(PageQuery):
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = MAX_PAGE
    order: Order = "desc"
    purpose: Annotated[str, Meta(max_length=64)] | None = None


class FileUpload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A form (multipart/form-data). `expires_after` is written as two fields, or as none."""

    file: Content
    purpose: Purpose
    anchor: Literal["created_at"] | None = msgspec.field(default=None, name=ANCHOR)
    seconds: ExpirySeconds | None = msgspec.field(default=None, name=SECONDS)

    @property
    def expires_after_s(self) -> int | None:
        if self.seconds is None and self.purpose == BATCH:
            return BATCH_EXPIRY_S
        return self.seconds


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


def read_upload(fields: dict[str, str], filename: str | None) -> FileUpload:
    """Raises: BadField."""
    given = dict(fields) | ({} if filename is None else {"file": filename})
    try:
        found = msgspec.convert(given, FileUpload, strict=False)
    except msgspec.ValidationError as error:
        raise to_bad_value(str(error)) from error
    if (found.anchor is None) != (found.seconds is None):
        missing = ANCHOR if found.anchor is None else SECONDS
        raise BadField(
            f"Missing required parameter: '{missing}'.",
            param=missing,
            detail="This required parameter is missing.",
        )
    return found


def to_file_object(file: File) -> FileObject:
    return view_of(FileObject, file, bytes=file.size_bytes)
