"""The errors that a request itself causes, wherever it is read.

BadField                    (null)              a field that cannot be honoured (names `param`)
├── ContextTooLong          context_length_exceeded
├── UnsupportedField        unsupported_parameter   known, and cannot be honoured here
├── UnknownField            (null)                  nobody here knows it
└── UnknownModel            model_not_found
    └── VersionNotServed    the version that its caller is pinned to is not there
RequestConflict             a header says something about the state that does not hold
├── PreconditionFailed      the resource is no longer the one that If-Match names
├── RequestInFlight         the first request with this Idempotency-Key has not ended
├── OtherRequest            this Idempotency-Key belongs to another request
│   └── OtherBody           the same for a generation
├── KeyUnknown              Postgres does not say whose key it is
└── AnswerLost              the request was carried out; its answer is gone
    └── AnswerNotKept       its project keeps nothing, so the answer was never stored
TooManyAtOnce
├── TooManyInBackground     its org has as many responses in the background as it may
└── TooManyFollowed         its org follows as many as it may on one worker

Knows no HTTP beyond the status and the code of an answer.
"""

from __future__ import annotations

from typing import ClassVar

from foundation.errors import CodedError


class BadField(CodedError):
    """A field of the request cannot be honoured. `detail`: the message without a word of the
    client's; None: it has none."""

    status: ClassVar[int] = 400
    constant: ClassVar[str | None] = "This is not what can stand here."
    """The detail of errors that are given none."""

    def __init__(
        self, message: str, *, param: str | None = None, detail: str | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.detail = detail or self.constant


class ContextTooLong(BadField):
    code = "context_length_exceeded"
    constant = None


class UnsupportedField(BadField):
    code = "unsupported_parameter"
    constant = None


class UnknownField(BadField):
    """A field of a body that nobody here knows. `place`: the path of the object that it stands in,
    `messages[0]`; empty: the body. `field`: its name there."""

    def __init__(
        self, message: str, *, param: str, place: str, field: str, detail: str | None = None
    ) -> None:
        super().__init__(message, param=param, detail=detail)
        self.place, self.field = place, field


class UnknownModel(BadField):
    status = 404
    code = "model_not_found"
    constant = None


class VersionNotServed(UnknownModel):
    """The caller is pinned to a version of the model that nothing serves here."""


class RequestConflict(Exception):
    """A header of the request says something about the state that does not hold."""

    status: ClassVar[int] = 409
    code: ClassVar[str]
    message: ClassVar[str]
    param: ClassVar[str] = "Idempotency-Key"
    retry: ClassVar[bool] = False


class PreconditionFailed(RequestConflict):
    status = 412
    code = "precondition_failed"
    message = "It has been changed since: read it again, and send its new ETag in 'If-Match'."
    param = "If-Match"


class RequestInFlight(RequestConflict):
    code = "idempotency_in_flight"
    message = "A request with this 'Idempotency-Key' has not ended yet; try again shortly."
    retry = True


class OtherRequest(RequestConflict):
    status = 422
    code = "idempotency_key_reused"
    message = "This 'Idempotency-Key' was used for another request."


class OtherBody(OtherRequest):
    status = 400


class KeyUnknown(RequestConflict):
    status = 503
    code = "service_unavailable"
    message = "Whether this 'Idempotency-Key' was used before cannot be known at the moment."
    retry = True


class AnswerLost(RequestConflict):
    code = "idempotency_answer_lost"
    message = (
        "The request with this 'Idempotency-Key' was carried out, but its answer was lost: look for"
        " what it made."
    )


class AnswerNotKept(AnswerLost):
    message = (
        "The request with this 'Idempotency-Key' was carried out; what it answered is not there"
        " again, as its project keeps nothing."
    )


class TooManyAtOnce(Exception):
    """More responses at once than the org may have. `most`: the bound."""

    what: ClassVar[str]

    def __init__(self, most: int) -> None:
        super().__init__(f"{self.what} {most} already")
        self.most = most


class TooManyInBackground(TooManyAtOnce):
    what = "responses in the background"


class TooManyFollowed(TooManyAtOnce):
    what = "streams of responses in the background"
