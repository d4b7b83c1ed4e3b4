"""What a client said in a header of what is there, and does not hold."""

from __future__ import annotations

from typing import ClassVar


class RequestConflict(Exception):
    """What a client said about the state, in a header, does not hold.

    RequestConflict
    ├── PreconditionFailed    the thing is no longer the one that If-Match names
    ├── RequestInFlight       the first request with this Idempotency-Key has not ended
    ├── OtherRequest          this Idempotency-Key was another request's
    │   └── OtherBody         the same, of a generation
    ├── KeyUnknown            Postgres does not say whose it was
    └── AnswerLost            that request was carried out; what it answered is gone
        └── AnswerNotKept     and never was there, as its project keeps nothing
    """

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
