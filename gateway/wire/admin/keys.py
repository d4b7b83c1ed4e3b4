"""API keys as our own administration writes them: `/v1/admin/keys`.

Which values a field may have is for the verbs of `tenancy` to say; here it has the right name and
type. Moments are Unix seconds, as in OpenAI's administration.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from foundation.structs import given, patch_of, with_fields
from gateway.principal import KEY_LIMIT_NAMES, LIMIT_NAMES, SCOPE_INFERENCE, KeyLane
from gateway.tenancy.keys import restrictions
from gateway.tenancy.keys.changes import DEFAULT_GRACE_S
from gateway.tenancy.keys.keys import KeyRow
from gateway.wire.shared.resource import view_of

Moment = Annotated[int, Meta(ge=0, le=253_402_300_799)]
"""Unix seconds, to the end of the year 9999."""
Number = Annotated[int, Meta(ge=0, le=2**62)]
Text = Annotated[str, Meta(max_length=1000, pattern=r"^[^\x00]*$")]
"""Postgres knows no NUL."""
Texts = Annotated[list[Text], Meta(max_length=1000)]


class StrictBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A body whose unknown fields are refused by name."""


@with_fields(LIMIT_NAMES, Number | None | UnsetType, UNSET)
class ModelLimitsPatch(StrictBody):
    """A change of a key's limits of one model, beside its limits of all (RFC 7396)."""


ByModel = dict[Text, ModelLimitsPatch | None]
"""Null takes away all limits of a model."""


@with_fields(KEY_LIMIT_NAMES, Number | None, None, after="ip_ranges")
class KeyCreate(StrictBody):
    """The body of `POST /v1/admin/keys`."""

    name: Text
    project_id: Text | None = None
    """None: of administration alone, and of no project."""
    scopes: Texts = msgspec.field(default_factory=lambda: [SCOPE_INFERENCE])
    plan: Text | None = None
    expires_at: Moment | None = None
    models: Texts | None = None
    ip_ranges: Texts | None = None
    lane: KeyLane | None = None
    model_limits: ByModel | None = None
    shows_cost: bool | None = None
    """None: as its organization has it."""
    user_id: Text | None = None
    service_account_id: Text | None = None


@patch_of(KeyCreate, without=("project_id", "user_id", "service_account_id"))
class KeyPatch(StrictBody):
    """The body of `PATCH /v1/admin/keys/{id}` (RFC 7396): what is left out stays, null takes it
    away."""


class KeyRotate(StrictBody):
    """The body of `POST /v1/admin/keys/{id}/rotate`."""

    grace_s: Number = DEFAULT_GRACE_S
    """For how long the secret until now stays good."""


class LeakReport(StrictBody):
    """The body of `POST /v1/admin/keys/report-leak`."""

    key: Text


class KeyOwnerView(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["user", "service_account"]
    id: str


class PreviousSecret(msgspec.Struct, frozen=True, kw_only=True):
    """The previous secret of a key that was rotated."""

    redacted_value: str
    expires_at: int


@with_fields(LIMIT_NAMES, int | None, None)
class ModelLimitsView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of one model that are set."""


@with_fields(KEY_LIMIT_NAMES, int | None, after="ip_ranges")
class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "api_key"
    id: str
    name: str
    project_id: str | None
    redacted_value: str
    scopes: list[str]
    plan: str | None
    models: list[str] | None
    ip_ranges: list[str] | None
    lane: KeyLane | None
    model_limits: dict[str, ModelLimitsView] | None
    shows_cost: bool | None
    """Whether its answers say what they cost; None: as its organization has it."""
    for_console: bool
    """Whether it is the one under which the console spends for its owner; it cannot be rotated."""
    owner: KeyOwnerView | None
    created_at: int
    expires_at: int | None
    revoked_at: int | None
    last_used_at: int | None
    previous: PreviousSecret | None
    """None where its grace is over, too."""


class KeyWithSecret(KeyView, frozen=True, kw_only=True):
    """The only answer that ever holds the secret."""

    value: str

    def __repr__(self) -> str:
        return f"KeyWithSecret({self.redacted_value})"


def to_wire(row: KeyRow) -> KeyView:
    owner, own = None, row.model_limits
    if row.user_id is not None:
        owner = KeyOwnerView(type="user", id=row.user_id)
    elif row.service_account_id is not None:
        owner = KeyOwnerView(type="service_account", id=row.service_account_id)
    previous = None
    until = row.previous_expires_at
    if row.previous_hint is not None and until is not None and until > datetime.now(tz=UTC):
        previous = PreviousSecret(
            redacted_value=row.previous_hint, expires_at=int(until.timestamp())
        )
    return view_of(
        KeyView,
        row,
        model_limits=own and {model: ModelLimitsView(**own[model]) for model in sorted(own)},
        redacted_value=row.hint,
        owner=owner,
        previous=previous,
    )


def to_wire_once(row: KeyRow, secret: str) -> KeyWithSecret:
    return view_of(KeyWithSecret, to_wire(row), value=secret)


def to_patch(by_model: ByModel | None) -> restrictions.ModelLimitsPatch | None:
    if by_model is None:
        return None
    return {model: None if limits is None else given(limits) for model, limits in by_model.items()}


def from_seconds(moment: int | None) -> datetime | None:
    return None if moment is None else datetime.fromtimestamp(moment, tz=UTC)
