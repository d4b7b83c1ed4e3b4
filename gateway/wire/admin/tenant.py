"""/v1/admin/organization, /projects, /users and /invites: what clients write and read.

Moments are Unix seconds. A field that a change leaves out stays as it is; a null plan is none.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from foundation.structs import patch_of
from gateway.net.mail import MailOutcome
from gateway.principal import Role

MAX_ORIGINS = 50
MAX_INVITE_PROJECTS = 100

Id = Annotated[str, Meta(min_length=1, max_length=128)]
Name = Annotated[str, Meta(min_length=1, max_length=100)]
Email = Annotated[str, Meta(min_length=3, max_length=254)]
Origin = Annotated[str, Meta(min_length=1, max_length=255)]
Origins = Annotated[list[Origin], Meta(max_length=MAX_ORIGINS)]
ProjectRole = Literal["owner", "member"]


class OrganizationPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cors_origins: Origins | UnsetType = UNSET
    shows_cost: bool | UnsetType = UNSET


class NewProject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Name
    plan: Name | None = None
    zero_retention: bool = False
    store_content: bool = False


@patch_of(NewProject)
class ProjectPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class ProjectView(msgspec.Struct, frozen=True, kw_only=True):
    """A project. `models`: those that may be used, or may not, as `models_mode` says.
    `zero_retention`: nothing is kept of what is asked and answered in it, but in files and batches,
    and the answer to an `Idempotency-Key` for a day. `store_content`: the texts of its requests and
    answers are stored, sealed, for `[requests] content_days`, for who has `admin:content`; spans of
    its traces have them, too. Set to false, what is stored is erased."""

    object: str = "project"
    id: str
    name: str
    plan: str | None
    models_mode: str | None
    models: list[str] | None
    zero_retention: bool
    store_content: bool
    created_at: int
    archived_at: int | None


class MailChoices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The topics of e-mail to switch on or off; those left out stay as they are."""

    budgets: bool | UnsetType = UNSET
    credits: bool | UnsetType = UNSET
    invoices: bool | UnsetType = UNSET
    payments: bool | UnsetType = UNSET
    approvals: bool | UnsetType = UNSET
    batches: bool | UnsetType = UNSET
    rate_limits: bool | UnsetType = UNSET
    disputes: bool | UnsetType = UNSET


class UserPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Role | UnsetType = UNSET
    mail: MailChoices | UnsetType = UNSET


class UserView(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "user"
    id: str
    email: str
    name: str
    role: Role
    mail: dict[str, bool]
    """The topics of e-mail that are for the role, and whether each is sent; `payments` is sent in
    the operator's organization alone."""
    created_at: int


class PasswordReset(msgspec.Struct, frozen=True, kw_only=True):
    """A password reset. `url`: where the user sets another password, once and until `expires_at`;
    shown this once. `mail`: whether the link was sent to them."""

    object: str = "user.password_reset"
    user_id: str
    expires_at: int
    url: str
    mail: MailOutcome


class InviteProject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: Id
    role: ProjectRole = "member"


class NewInvite(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new invite. `projects`: whoever accepts becomes their member or owner."""

    email: Email
    role: Role
    projects: Annotated[list[InviteProject], Meta(max_length=MAX_INVITE_PROJECTS)] = []


class CreatedInviteView(msgspec.Struct, frozen=True, kw_only=True):
    """An invite as its creator sees it. `url`: where it is accepted, shown this once. `mail`:
    whether the link was sent to the address."""

    object: str = "invite"
    id: str
    email: str
    role: Role
    projects: list[InviteProject]
    created_at: int
    expires_at: int
    url: str
    mail: MailOutcome
