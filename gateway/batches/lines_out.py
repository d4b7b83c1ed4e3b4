"""Writes the lines of a batch's output and of its error file; in Anthropic's shape, of its results.
Pure. A line that was answered has the answer's status, be it an error; one that was never run says
why."""

from __future__ import annotations

import msgspec

from gateway.batches.states import WHY, LineCode
from gateway.wire.anthropic.batches import (
    CanceledResult,
    ErroredResult,
    ExpiredResult,
    IndividualResponse,
    SucceededResult,
)

OVERHEAD_BYTES = 512
"""Around an answer, beside the line's own id, at most."""
ESCAPED = 6
"""JSON escapes a byte of an id to at most this many bytes."""
OPENAI_PREFIX = "batch_req_"


class Response(msgspec.Struct, frozen=True, kw_only=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class UnrunError(msgspec.Struct, frozen=True, kw_only=True):
    code: LineCode
    message: str


class OutputLine(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    custom_id: str
    response: Response | None
    error: UnrunError | None


class EndedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line as it stands in its row. `code`: of one that was never run, which has no answer."""

    number: int
    custom_id: str
    state: str
    request_id: str | None
    status: int | None
    code: LineCode | None
    answer: bytes | None

    @property
    def is_output(self) -> bool:
        return self.state == "done"


def to_line(batch_id: str, line: EndedRow) -> bytes:
    """Write a line with its line feed."""
    response, error = None, None
    if line.answer is not None and line.status is not None:
        response = Response(
            status_code=line.status,
            request_id=line.request_id or "",
            body=msgspec.Raw(line.answer),
        )
    elif line.code is not None:
        error = UnrunError(code=line.code, message=WHY[line.code])
    written = OutputLine(
        id=f"{OPENAI_PREFIX}{batch_id.rpartition('_')[2]}{line.number:06d}",
        custom_id=line.custom_id,
        response=response,
        error=error,
    )
    return msgspec.json.encode(written) + b"\n"


def to_message_line(line: EndedRow) -> bytes:
    """Write a line in Anthropic's shape, with its line feed."""
    answer = msgspec.Raw(line.answer or b"")
    result: SucceededResult | ErroredResult | CanceledResult | ExpiredResult
    if line.code is not None:
        result = CanceledResult() if line.code == "batch_cancelled" else ExpiredResult()
    elif line.is_output:
        result = SucceededResult(message=answer)
    else:
        result = ErroredResult(error=answer)
    written = IndividualResponse(custom_id=line.custom_id, result=result)
    return msgspec.json.encode(written) + b"\n"
