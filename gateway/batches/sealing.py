"""Names the columns in which batches are sealed: what their lines ask, under which id, and are
answered; what their owners noted; what was wrong with their input."""

from __future__ import annotations

import logging

import msgspec

from gateway.batches.tables import batch_lines, batches
from gateway.columns import UNREADABLE, SealedColumns
from gateway.secret import Cipher
from gateway.wire.shared.batch import Batch

log = logging.getLogger(__name__)

PURPOSE = "batches"
"""`Secret` derives a key for it."""
_LINE = ("org_id", "batch_id", "number")
_BATCH = ("org_id", "project_id", "id")
REQUESTS = SealedColumns(
    table=batch_lines, columns=("custom_id", "body"), place=_LINE, purpose=PURPOSE
)
ANSWERS = SealedColumns(
    table=batch_lines,
    columns=("answer",),
    place=_LINE,
    purpose=PURPOSE,
    secret="answer_secret_id",
)
METADATA = SealedColumns(
    table=batches, columns=("metadata",), place=_BATCH, purpose=PURPOSE, secret="metadata_secret_id"
)
ERRORS = SealedColumns(
    table=batches, columns=("errors",), place=_BATCH, purpose=PURPOSE, secret="errors_secret_id"
)


def opened(cipher: Cipher, batch: Batch) -> Batch:
    """Return a batch as its owner is shown it, without what is lost."""
    row, plain = msgspec.structs.asdict(batch), dict[str, object]()
    for found in (METADATA, ERRORS):
        try:
            plain |= found.open(cipher, row)
        except UNREADABLE as error:
            log.error("%s of %s do not open: %r", found.columns, batch.id, error)
            plain |= dict.fromkeys(found.columns)
    return msgspec.structs.replace(batch, **plain)
