"""The one table that turns what went wrong into HTTP, in the OpenAI shape.

    exception                          status  type                    code
    ---------                          ------  ----                    ----
    auth: WrongNetwork                 401     invalid_request_error   ip_not_authorized
    auth: WrongOrganization            401     invalid_request_error   wrong_organization
    auth: AuthError                    401     invalid_request_error   invalid_api_key
    auth: MissingScope                 403     invalid_request_error   insufficient_permissions
    auth: AuthUnavailable              503     server_error            service_unavailable
    fleet: ContextTooLong              400     invalid_request_error   context_length_exceeded
    fleet: UnknownModel                404     invalid_request_error   model_not_found
    fleet: UnsupportedField            400     invalid_request_error   unsupported_parameter
    fleet: BadField                    400     invalid_request_error   (null)
    fleet: UpstreamRefused             its 4xx  invalid_request_error   one of OpenAI's, or null
    fleet: ReplicaOverloaded           503     server_error            overloaded
    fleet: ReplicaUnavailable          503     server_error            service_unavailable
    fleet: ReplicaLost                 500     server_error            (null)
    fleet: DeadlinePassed              504     server_error            deadline_exceeded
    RateLimited                        429     tokens | requests       rate_limit_exceeded
    RateLimited by a spend cap         429     insufficient_quota      insufficient_quota
    OrgSuspended                       402     billing_error           organization_suspended
    limits: UnpricedModel              400     invalid_request_error   model_without_price
    limits: SpentUnknown, ScriptFailed 503     server_error            service_unavailable
    NotAccepting                       503     server_error            service_unavailable
    EncodedBody                        415     invalid_request_error   unsupported_content_encoding
    OtherMediaType                     415     invalid_request_error   unsupported_media_type
    RequestTooLarge                    413     invalid_request_error   request_too_large
    RequestConflict                    412, 409, 422, 400, 503  invalid_request_error  its own
    tenancy: InvalidField              400     invalid_request_error   (null)
    tenancy: NotFound                  404     invalid_request_error   not_found
    audit: CredentialInAudit           400     invalid_request_error   (null)
    files: ContentLost                 410     invalid_request_error   content_lost
    files: FilesError                  503     server_error            service_unavailable
    secret: UnknownSecret              410     invalid_request_error   content_unreadable
    signing_keys: TooSoon              409     invalid_request_error   too_soon
    tenancy: Conflict                  409     invalid_request_error   its own
    tenancy: NotAllowed                403     invalid_request_error   insufficient_permissions
    tenancy: ChangeNotAnnounced        503     server_error            service_unavailable
    billing: BadInvoicing, NoInvoice, InvoicingConflict   as InvalidField, NotFound, Conflict
    sqlalchemy: a NUL in a text        400     invalid_request_error   (null)
    UnknownPath                        404     invalid_request_error   unknown_url
    litestar: HTTPException            its own
    anything else                      500     server_error            (null)

Clients read constant messages or ones that name their own field; the detail goes to the log. Knows
no Litestar beyond the `status_code` of its exceptions.
"""

from __future__ import annotations

import logging
import math

import msgspec

from billing.errors import (
    InvoicingConflict,
    InvoicingError,
    NoInvoice,
    ReportQueryError,
    SpoolError,
)
from billing.money import format_usd
from gateway.audit.errors import CredentialInAudit
from gateway.auth.errors import AuthError, AuthUnavailable, MissingScope
from gateway.auth.oauth.tokens.signing_keys import TooSoon
from gateway.credential_forms import without_credentials
from gateway.files.errors import ContentLost, FilesError
from gateway.fleet.errors import (
    DeadlinePassed,
    FleetError,
    ReplicaUnavailable,
    UpstreamRefused,
)
from gateway.inference.generate import NotAccepting, RateLimited
from gateway.lanes import DEADLINE_HEADER
from gateway.limits.counters import SpentUnknown
from gateway.limits.headers import to_headers
from gateway.limits.outcomes import MONEY, Refusal
from gateway.limits.redis.scope_limits import ScopeName
from gateway.limits.redis.scripts import ScriptFailed
from gateway.limits.spending import PICO_PER_NANO, UnpricedModel
from gateway.principal import PLAN_LIMITS, OrgSuspended
from gateway.request_errors import (
    BadField,
    RequestConflict,
    TooManyAtOnce,
)
from gateway.secret import UnknownSecret
from gateway.tenancy.errors import (
    ChangeNotAnnounced,
    Conflict,
    InvalidField,
    NotAllowed,
    NotFound,
    TenancyError,
)

log = logging.getLogger(__name__)

RETRY_LATER_S = 1.0


class EncodedBody(Exception):
    """A request body in a content coding: nothing is decompressed here."""


class OtherMediaType(Exception):
    """A request body that is said to be something else than JSON."""


class RequestTooLarge(Exception):
    """A request's body has more bytes than are read. `most_bytes`: so many; None: nobody said."""

    def __init__(self, most_bytes: int | None) -> None:
        super().__init__(f"more than {most_bytes} bytes")
        self.most_bytes = most_bytes


class UnknownPath(Exception):
    """Nothing is at a path. `near`: one that may be meant; None: nobody knows."""

    def __init__(self, near: str | None) -> None:
        super().__init__(near)
        self.near = near


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """`{"error": {...}}` is what the SDK reads; `code` is a symbol or null, never the HTTP
    number."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class HttpError(msgspec.Struct, frozen=True, kw_only=True):
    """An error as the client sees it."""

    status: int
    body: ErrorBody
    headers: dict[str, str] = {}
    detail: str | None = None
    """The same without a word of the caller's; None: `body.message` has none."""
    scope: str | None = None
    """The one that a credential lacks."""

    @property
    def code(self) -> str:
        """Return the code that tells it apart: its type where it has none."""
        return self.body.code or self.body.type

    def encode(self) -> bytes:
        return msgspec.json.encode({"error": self.body})


INVALID = "invalid_request_error"
SERVER = "server_error"
QUOTA = "insufficient_quota"
UNAVAILABLE = "service_unavailable"
UNKNOWN_URL = "unknown_url"
IN_BACKGROUND_S = 10.0
"""Retry-After of a refusal for too many at once: one of them has to end first."""
LACKS_SCOPE = "This credential lacks a scope that this needs."
HOLDS_CREDENTIAL = "it holds a credential"
UNREADABLE = "This can no longer be read: the secret that it was sealed under was removed."
DEADLINE = DEADLINE_HEADER.decode()


def http_error(
    status: int,
    message: str,
    kind: str,
    *,
    code: str | None = None,
    param: str | None = None,
    headers: dict[str, str] | None = None,
    detail: str | None = None,
) -> HttpError:
    # Messages name what the caller wrote: by mistake, a credential.
    told = without_credentials(message)
    body = ErrorBody(message=told, type=kind, param=param, code=code)
    return HttpError(status=status, body=body, headers=headers or {}, detail=detail)


def rounded_up(amount: float) -> int:
    """To a whole one, but for what the arithmetic of floats has added."""
    return math.ceil(round(amount, 6))


def retry_headers(delay_s: float) -> dict[str, str]:
    """`retry-after` in whole seconds, rounded up; `retry-after-ms` wins where the SDK knows it."""
    return {
        "retry-after": str(max(1, rounded_up(delay_s))),
        "retry-after-ms": str(max(1, rounded_up(delay_s * 1000))),
        "x-should-retry": "true",
    }


def unavailable(
    message: str, *, code: str = UNAVAILABLE, delay_s: float = RETRY_LATER_S
) -> HttpError:
    return http_error(503, message, SERVER, code=code, headers=retry_headers(delay_s))


def to_http_error(error: Exception) -> HttpError:
    """Never raises; what it does not know is a 500 and goes to the log in full."""
    match error:
        case AuthUnavailable() | MissingScope() | AuthError():
            return from_auth(error)
        case RateLimited():
            return refused(error.refusal)
        case OrgSuspended() | UnpricedModel() | SpentUnknown() | ScriptFailed() | TooManyAtOnce():
            return from_limits(error)
        case NotAccepting() | SpoolError():
            return unavailable("This gateway cannot take requests at the moment.")
        case ReportQueryError():
            message = f"Invalid value for '{error.param}': {error}."
            return http_error(400, message, INVALID, param=error.param)
        case UnknownPath() | EncodedBody() | OtherMediaType() | RequestTooLarge():
            return from_head(error)
        case BadField() | FleetError():
            return from_fleet(error)
        case RequestConflict():
            return from_conflict(error)
        case CredentialInAudit():
            message = f"Invalid value for '{error.field}': {HOLDS_CREDENTIAL}."
            return http_error(
                400, message, INVALID, param=error.field, detail=capital(HOLDS_CREDENTIAL)
            )
        case TenancyError():
            return from_tenancy(error)
        case InvoicingError():
            return from_tenancy(to_tenancy(error))
        case _:
            return from_anything(error)


def from_head(error: UnknownPath | EncodedBody | OtherMediaType | RequestTooLarge) -> HttpError:
    if isinstance(error, UnknownPath):
        message = detail = HTTP_MESSAGES[404]
        if error.near is not None:
            message += f" The paths of the API begin with '/v1', once: did you mean '{error.near}'?"
        return http_error(404, message, INVALID, code=UNKNOWN_URL, detail=detail)
    if isinstance(error, RequestTooLarge):
        most = "" if error.most_bytes is None else f": more than {error.most_bytes} bytes"
        message, code = f"The request body is too large{most}.", "request_too_large"
        return http_error(413, message, INVALID, code=code, param="body")
    # RFC 9110, 15.5.16: what would be accepted.
    if isinstance(error, OtherMediaType):
        param, code = "Content-Type", "unsupported_media_type"
        message = "The request body must be JSON: send the header 'Content-Type: application/json'."
        headers = {"accept": "application/json"}
    else:
        param, code = "Content-Encoding", "unsupported_content_encoding"
        message = "The header 'Content-Encoding' is not supported: send the request body as it is."
        headers = {"accept-encoding": "identity"}
    return http_error(415, message, INVALID, code=code, param=param, headers=headers)


def from_auth(error: AuthUnavailable | MissingScope | AuthError) -> HttpError:
    match error:
        case AuthUnavailable():
            return unavailable("Credentials cannot be checked at the moment.")
        case MissingScope():
            message = f"This credential lacks the scope {error.scope!r}."
            found = http_error(
                403, message, INVALID, code="insufficient_permissions", detail=LACKS_SCOPE
            )
            return msgspec.structs.replace(found, scope=error.scope)
        case _:
            # A closed text beside it, for who repeats nothing of the caller's.
            return http_error(
                401, error.message, INVALID, code=error.code, detail=error.public_message
            )


def from_fleet(error: Exception) -> HttpError:
    match error:
        case BadField():
            code, param, detail = error.code, error.param, error.detail
            return http_error(
                error.status, error.message, INVALID, code=code, param=param, detail=detail
            )
        case ReplicaUnavailable():
            code, delay_s = error.code, error.retry_after_s
            return unavailable(error.public_message, code=code, delay_s=delay_s)
        case UpstreamRefused():
            headers = {} if error.retry_after_s is None else retry_headers(error.retry_after_s)
            body = ErrorBody(
                message=error.message,
                type=error.error_type,
                param=error.param,
                code=error.error_code,
            )
            return HttpError(status=error.status, body=body, headers=headers)
        case DeadlinePassed():
            # The SDK would repeat it, and what was generated is billed each time.
            message = f"The answer was not complete in the time that {DEADLINE!r} gives it."
            code, headers = error.code, {"x-should-retry": "false"}
            return http_error(504, message, SERVER, code=code, param=DEADLINE, headers=headers)
        case _:
            log.warning("replica lost: %s", error)
            return http_error(500, "The model stopped before the answer was complete.", SERVER)


def from_conflict(error: RequestConflict) -> HttpError:
    headers = retry_headers(RETRY_LATER_S) if error.retry else {"x-should-retry": "false"}
    return http_error(
        error.status, error.message, INVALID, code=error.code, param=error.param, headers=headers
    )


def from_tenancy(error: TenancyError) -> HttpError:
    """Their texts name the caller's own fields and values; their details do not."""
    detail = capital(error.detail)
    match error:
        case TooSoon():
            headers = retry_headers(error.retry_after_s)
            message = capital(error.message)
            return http_error(409, message, INVALID, code="too_soon", headers=headers)
        case NotFound() | Conflict() | NotAllowed():
            # The SDK repeats a 409 unless it is told that this is in vain.
            headers = {"x-should-retry": "false"} if error.status == 409 else {}
            message, code, param = capital(error.message), error.code, error.param
            return http_error(
                error.status,
                message,
                INVALID,
                code=code,
                param=param,
                headers=headers,
                detail=detail,
            )
        case ChangeNotAnnounced():
            return unavailable("The change is saved, but not every worker knows yet; repeat it.")
        case InvalidField():
            message = f"Invalid value for '{error.param}': {error.message}."
            return http_error(400, message, INVALID, param=error.param, detail=detail)
        case _:
            return from_anything(error)


def to_tenancy(error: InvoicingError) -> TenancyError:
    """Invoices are administered as tenants are, and refuse alike."""
    match error:
        case NoInvoice():
            return NotFound(error.param, error.message)
        case InvoicingConflict():
            return Conflict(error.param, error.message)
        case _:
            return InvalidField(error.param, error.message)


def capital(message: str) -> str:
    return f"{message[:1].upper()}{message[1:]}."


LIMITED = {limit.kind: limit.title for limit in PLAN_LIMITS}
PERIODS = {
    "day": "today (UTC)",
    "month": "in this month (UTC)",
    "total": "in all",
}


def from_limits(
    error: OrgSuspended | UnpricedModel | SpentUnknown | ScriptFailed | TooManyAtOnce,
) -> HttpError:
    match error:
        case TooManyAtOnce():
            message = f"This organization has {error.most} {error.what} already."
            code, headers = "rate_limit_exceeded", retry_headers(IN_BACKGROUND_S)
            return http_error(429, message, "requests", code=code, headers=headers)
        case OrgSuspended():
            message = (
                f"This organization is suspended: its invoice {error.number} has not been paid."
                " It is served again when it is, or when the operator lifts the suspension."
            )
            headers = {"x-should-retry": "false"}
            code = "organization_suspended"
            return http_error(402, message, "billing_error", code=code, headers=headers)
        case UnpricedModel():
            message = (
                f"The model {error.model!r} has no price, and what may be spent here is capped:"
                " nobody could say what a request costs."
            )
            return http_error(400, message, INVALID, code="model_without_price", param="model")
        case ScriptFailed():
            return unavailable("What was used under a limit cannot be known at the moment.")
        case _:
            return unavailable("What was spent under a hard cap cannot be known at the moment.")


def overspent(refusal: Refusal) -> HttpError:
    """429 as OpenAI's, which has no Retry-After: SDKs would repeat it by themselves."""
    headers = to_headers(refusal.state) | {"x-should-retry": "false"}
    limit, left = (format_usd(nano * PICO_PER_NANO) for nano in (refusal.limit, refusal.left_nano))
    period = PERIODS[refusal.period or "total"]
    if refusal.paid_for is not None:
        message = (
            f"What this org has paid in advance for the model {refusal.paid_for!r} does not allow"
            f" this request: {left} USD are neither spent nor held by requests that run. Credit"
            " that is for other models, or for a part of the cost alone, does not count."
        )
    else:
        message = (
            f"What this {refusal.scope} may spend {period} does not allow this request: {limit}"
            f" USD, of which {left} USD are neither spent nor held by requests that run."
        )
    if refusal.ends_at is not None:
        message += f" The period ends at {refusal.ends_at:%Y-%m-%dT%H:%M:%SZ}."
    if refusal.less_may_fit:
        message += " With a lower max_tokens it may fit."
    return http_error(429, message, QUOTA, code=QUOTA, headers=headers)


LIMITER: dict[ScopeName, str] = {"key_model": "key and model", "client": "OAuth client"}
"""How a message names a scope whose own name is not plain English."""


def refused(refusal: Refusal) -> HttpError:
    """429. A request that can never fit gets no Retry-After: waiting would not help."""
    if refusal.kind == MONEY:
        return overspent(refusal)
    headers = to_headers(refusal.state)
    subject = LIMITED[refusal.kind]
    owner = LIMITER.get(refusal.scope, refusal.scope)
    limit = f"Rate limit reached for this {owner} on {subject}: limit {refusal.limit}."
    if refusal.retry_after_s is None:
        headers["x-should-retry"] = "false"
        message = f"Request too large. {limit} It can never fit; ask for fewer tokens."
    else:
        headers |= retry_headers(refusal.retry_after_s)
        wait_ms = rounded_up(refusal.retry_after_s * 1000)
        message = f"{limit} Please try again in {wait_ms / 1000:.3f}s."
    return http_error(429, message, refusal.kind, code="rate_limit_exceeded", headers=headers)


def from_files(error: FilesError) -> HttpError:
    if isinstance(error, ContentLost):
        log.error("the content of a file is lost: %s", error)
        message = "The content of this file is lost."
        return http_error(410, message, INVALID, code="content_lost", param="file_id")
    log.warning("file store: %s", error)
    return unavailable("The store of files cannot be reached at the moment.")


UNSTORABLE = frozenset({"22021", "22P05"})
"""Postgres' codes for a text with a NUL, which it has no place for: in a path or a body where
nothing else has said what the text must be like."""
HTTP_MESSAGES = {
    404: "Unknown request URL.",
    405: "Method not allowed for this URL.",
}


def allow_of(error: Exception) -> dict[str, str]:
    """The `Allow` of a 405, without the OPTIONS that Litestar adds and the guard refuses."""
    found = (getattr(error, "headers", None) or {}).get("allow", "")
    methods = [each for each in found.split(", ") if each not in ("", "OPTIONS")]
    return {"allow": ", ".join(methods)} if methods else {}


def from_anything(error: Exception) -> HttpError:
    if isinstance(error, FilesError):
        return from_files(error)
    if isinstance(error, UnknownSecret):
        log.error("what is asked for was sealed under the secret %s, which was removed", error)
        return http_error(410, UNREADABLE, INVALID, code="content_unreadable")
    if getattr(getattr(error, "orig", None), "sqlstate", None) in UNSTORABLE:
        return http_error(400, "The request names something with a NUL character in it.", INVALID)
    status = getattr(error, "status_code", 500)
    if isinstance(status, int) and 400 <= status < 500:
        message = HTTP_MESSAGES.get(status, "The request was refused.")
        code = {404: UNKNOWN_URL}.get(status)
        return http_error(status, message, INVALID, code=code, headers=allow_of(error))
    log.error("unexpected %s", type(error).__name__, exc_info=error)
    return http_error(500, "The server had an error while processing your request.", SERVER)


RESPONSES_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
}
"""The Responses API's names of chat's fields, which replicas speak of."""


def to_responses_error(error: Exception) -> HttpError:
    """Return an error under the Responses API's names of fields: replicas name chat's."""
    found = to_http_error(error)
    theirs = found.body.param or ""
    ours = RESPONSES_NAMES.get(theirs)
    if ours is None:
        return found
    message = found.body.message.replace(f"'{theirs}'", f"'{ours}'")
    body = msgspec.structs.replace(found.body, message=message, param=ours)
    return msgspec.structs.replace(found, body=body)
