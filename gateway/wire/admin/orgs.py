"""/v1/admin/orgs: what clients write and read."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from foundation.structs import patch_of
from gateway.net.mail import MailOutcome

Name = Annotated[str, Meta(min_length=1, max_length=100)]
Email = Annotated[str, Meta(min_length=3, max_length=254)]


class NewOrg(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new org. `owner_email`: its first owner is invited. Without it the answer holds an admin
    key."""

    name: Name
    plan: Name | None = None
    owner_email: Email | None = None


@patch_of(NewOrg, without=("owner_email",))
class OrgPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prepaid: bool | UnsetType = UNSET


class OrgView(msgspec.Struct, frozen=True, kw_only=True):
    """An org. `is_operator`: it runs the installation. `cors_origins`, and `shows_cost` (its
    answers say what they cost): its own to change. `prepaid`: it spends no more than it was
    credited."""

    object: str = "organization"
    id: str
    name: str
    plan: str | None
    is_operator: bool
    cors_origins: list[str]
    prepaid: bool
    shows_cost: bool
    created_at: int
    archived_at: int | None
    suspension_lifted_at: int | None
    """The time at which an operator lifted the suspension; earlier causes no longer suspend."""


class FirstKey(msgspec.Struct, frozen=True, kw_only=True):
    """The first admin key. `value`: the key, shown this once."""

    id: str
    value: str


class FirstInvite(msgspec.Struct, frozen=True, kw_only=True):
    """The invite of the first owner. `url`: where it is accepted, shown this once. `mail`: whether
    the link was sent to the address."""

    id: str
    email: str
    url: str
    expires_at: int
    mail: MailOutcome


class CreatedOrg(msgspec.Struct, frozen=True, kw_only=True):
    """The organization, and the one way into it."""

    organization: OrgView
    admin_key: FirstKey | None = None
    owner_invite: FirstInvite | None = None
