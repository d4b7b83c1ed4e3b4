"""Files and batches, for `surfaces`: which of their fields are refused, and what else is to be
known of one.
"""

from __future__ import annotations

from gateway.wire.anthropic.batches import MessageBatchesQuery, NewMessageBatch
from gateway.wire.fields.surface import SurfaceFields
from gateway.wire.openai.batches import BatchesQuery, NewBatch, WrittenLine
from gateway.wire.openai.files import ANCHOR, SECONDS, FilesQuery, FileUpload

OTHER_ENDPOINTS = frozenset(
    {"/v1/moderations", "/v1/images/generations", "/v1/images/edits", "/v1/videos"}
)
FILES = SurfaceFields(
    title="POST /v1/files (multipart/form-data)",
    body=FileUpload,
    ignored={},
    notes={
        "file": "up to `max_file_bytes`, streamed",
        "purpose": "`batch` alone is put to a use here; files for others are kept",
        ANCHOR: f"with `{SECONDS}`, or neither",
        SECONDS: "of a file for a batch 30 days unless it is said; others stay",
    },
    refused_values={"purpose": frozenset({"evals"})},
)
FILE_LIST = SurfaceFields(
    title="GET /v1/files (query)", body=FilesQuery, ignored={}, notes={}, refused_values={}
)
BATCHES = SurfaceFields(
    title="POST /v1/batches",
    body=NewBatch,
    ignored={},
    notes={
        "input_file_id": "of the same project, uploaded for a batch",
        "endpoint": "`/v1/chat/completions`, `/v1/completions`, `/v1/embeddings`, `/v1/responses`",
        "output_expires_after": "30 days after they are written unless it is said",
    },
    refused_values={"endpoint": OTHER_ENDPOINTS},
)
BATCH_LINE = SurfaceFields(
    title="A line of a batch's input",
    body=WrittenLine,
    ignored={},
    notes={
        "custom_id": "once in a file",
        "method": "`POST`",
        "url": "the batch's `endpoint`",
        "body": "as that endpoint takes it; `stream` is refused, and of `/v1/responses` also"
        " `background` and `conversation`; what a model cannot take fails its line alone",
    },
    refused_values={},
)
BATCH_LIST = SurfaceFields(
    title="GET /v1/batches (query)",
    body=BatchesQuery,
    ignored={},
    notes={"order": "not OpenAI's: the newest come first unless it is said"},
    refused_values={},
)
MESSAGE_BATCHES = SurfaceFields(
    title="POST /v1/messages/batches",
    body=NewMessageBatch,
    ignored={},
    notes={
        "requests": "or as many as `max_batch_lines` says",
        "requests[].custom_id": "letters, digits, `_` and `-`; once in a batch",
        "requests[].params": "as `POST /v1/messages` takes them; `stream` is refused; what is wrong"
        " with them fails that request alone",
    },
    refused_values={},
)
MESSAGE_BATCH_LIST = SurfaceFields(
    title="GET /v1/messages/batches (query)",
    body=MessageBatchesQuery,
    ignored={"beta": "an SDK's name for the same batches"},
    notes={
        "after_id": "those that are older",
        "before_id": "those that are newer, the nearest of them",
    },
    refused_values={},
)
BATCH_SURFACES = (
    *(FILES, FILE_LIST, BATCHES, BATCH_LINE, BATCH_LIST),
    *(MESSAGE_BATCHES, MESSAGE_BATCH_LIST),
)
