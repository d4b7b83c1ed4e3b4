"""OpenAI's organization endpoints for whom and what an org has: projects, users, invites, service
accounts, keys, rate limits. Their bodies, their queries, their answers.

Structs only: names and types are those of the official SDK's admin client; a field that cannot be
honoured here is refused by name, and one that nobody knows too. Which values are good is for
`gateway.tenancy` to say.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from foundation.structs import with_fields
from gateway.principal import PROJECT_LIMITS

MAX_SECONDS = 10 * 366 * 24 * 3600
MAX_SCOPES = 64
MAX_EMAILS = 100
MAX_INVITE_PROJECTS = 100

Text = Annotated[str, Meta(max_length=1024)]
Limit = Annotated[int, Meta(ge=1, le=100)]
Cursor = Annotated[str, Meta(min_length=1, max_length=1024)]
Seconds = Annotated[int, Meta(ge=1, le=MAX_SECONDS)]
Amount = Annotated[int, Meta(ge=0, le=2**53)]

# ---- bodies


class OrganizationBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body of a POST. A field of `Any | None` is one of OpenAI's that is not honoured here: null
    means nothing, and everything else is refused by its name."""


class ProjectCreate(OrganizationBody, frozen=True, kw_only=True):
    name: Text
    external_key_id: Any = None
    geography: Any = None
    residency: Any = None


class ProjectUpdate(OrganizationBody, frozen=True, kw_only=True):
    name: Text | UnsetType = UNSET
    external_key_id: Any = None
    geography: Any = None


class UserUpdate(OrganizationBody, frozen=True, kw_only=True):
    role: Text | None = None
    role_id: Any = None
    developer_persona: Any = None
    technical_level: Any = None


class InviteProjectRole(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: Text
    role: Literal["member", "owner"]


class InviteCreate(OrganizationBody, frozen=True, kw_only=True):
    email: Text
    role: Literal["reader", "owner"]
    projects: (
        Annotated[list[InviteProjectRole], Meta(max_length=MAX_INVITE_PROJECTS)] | UnsetType
    ) = UNSET


class ProjectUserCreate(OrganizationBody, frozen=True, kw_only=True):
    role: Text
    email: Text | None = None
    user_id: Text | None = None


class ProjectUserUpdate(OrganizationBody, frozen=True, kw_only=True):
    role: Text | None = None


class ServiceAccountCreate(OrganizationBody, frozen=True, kw_only=True):
    name: Text
    create_service_account_only: bool | None = None
    expires_in_seconds: Seconds | None = None


class ServiceAccountUpdate(OrganizationBody, frozen=True, kw_only=True):
    name: Text | UnsetType = UNSET
    role: Literal["member", "owner"] | UnsetType = UNSET


class ServiceAccountKeyCreate(OrganizationBody, frozen=True, kw_only=True):
    name: Text | UnsetType = UNSET
    scopes: Annotated[list[Text], Meta(max_length=MAX_SCOPES)] | UnsetType = UNSET
    expires_in_seconds: Seconds | None = None


class ProjectKeyUpdate(OrganizationBody, frozen=True, kw_only=True):
    expires_in_seconds: Seconds | UnsetType = UNSET
    scopes: Annotated[list[Text], Meta(max_length=MAX_SCOPES)] | UnsetType = UNSET


@with_fields(PROJECT_LIMITS.values(), Amount | UnsetType, UNSET)
class RateLimitUpdate(OrganizationBody, frozen=True, kw_only=True):
    max_requests_per_1_minute: Any = None
    max_tokens_per_1_minute: Any = None
    max_images_per_1_minute: Any = None
    max_audio_megabytes_per_1_minute: Any = None
    max_requests_per_1_day: Any = None
    batch_1_day_max_input_tokens: Any = None


class AdminKeyCreate(OrganizationBody, frozen=True, kw_only=True):
    name: Text
    expires_in_seconds: Seconds | UnsetType = UNSET


class EmptyObject(OrganizationBody, frozen=True, kw_only=True):
    """The body of a POST that says it all by its URL."""


# ---- queries


class ListQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    after: Cursor | None = None
    limit: Limit = 20


class OrganizationProjectsQuery(ListQuery, frozen=True, kw_only=True):
    include_archived: bool = False


class UsersQuery(ListQuery, frozen=True, kw_only=True):
    emails: Annotated[list[Text], Meta(max_length=MAX_EMAILS)] = []


class ProjectKeysQuery(ListQuery, frozen=True, kw_only=True):
    owner_project_access: Literal["active", "inactive", "any"] = "any"


class AdminKeysQuery(ListQuery, frozen=True, kw_only=True):
    order: Literal["asc", "desc"] = "asc"


class RateLimitsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    after: Cursor | None = None
    before: Cursor | None = None
    limit: Limit = 100


# ---- answers


class DeletedObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str
    deleted: Literal[True] = True


class ProjectObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["organization.project"] = "organization.project"
    name: str
    created_at: int
    archived_at: int | None
    status: Literal["active", "archived"]
    external_key_id: None = None
    residency: None = None


class UserProject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    role: str


class UserProjects(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[UserProject]


class UserDetails(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["user"] = "user"
    email: str
    name: str
    enabled: bool = True
    banned: bool = False
    banned_at: None = None
    picture: None = None


class OrganizationUser(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["organization.user"] = "organization.user"
    email: str
    name: str
    role: str
    added_at: int
    created: int
    user: UserDetails
    projects: UserProjects
    is_default: bool = False
    is_service_account: bool = False
    is_scim_managed: bool = False
    is_scale_tier_authorized_purchaser: bool = False
    api_key_last_used_at: int | None = None
    developer_persona: None = None
    technical_level: None = None


class InvitedProject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    role: Literal["member", "owner"]


class InviteObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["organization.invite"] = "organization.invite"
    email: str
    role: str
    status: Literal["accepted", "expired", "pending"]
    projects: list[InvitedProject]
    created_at: int
    expires_at: int
    accepted_at: int | None


class ProjectUser(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["organization.project.user"] = "organization.project.user"
    email: str
    name: str
    role: str
    added_at: int


class ServiceAccountObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["organization.project.service_account"] = "organization.project.service_account"
    name: str
    role: Literal["owner", "member", "none"]
    created_at: int


class ServiceAccountKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key, with its secret this once."""

    id: str
    object: Literal["organization.project.service_account.api_key"] = (
        "organization.project.service_account.api_key"
    )
    name: str
    value: str
    created_at: int
    expires_at: int | None

    def __repr__(self) -> str:
        return f"ServiceAccountKey({self.id})"


class CreatedServiceAccount(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["organization.project.service_account"] = "organization.project.service_account"
    name: str
    role: Literal["member", "none"]
    created_at: int
    api_key: ServiceAccountKey | None


class KeyOwnerUser(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    email: str
    name: str
    role: str
    created_at: int


class KeyOwnerServiceAccount(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    role: str
    created_at: int


class ApiKeyOwner(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of a key; all null: the key is nobody's."""

    type: Literal["user", "service_account"] | None = None
    user: KeyOwnerUser | None = None
    service_account: KeyOwnerServiceAccount | None = None


class ProjectKey(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["organization.project.api_key"] = "organization.project.api_key"
    name: str
    redacted_value: str
    created_at: int
    last_used_at: int | None
    expires_at: int | None
    owner: ApiKeyOwner
    owner_project_access: Literal["active", "inactive"]


class AdminKeyOwner(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of an admin key; all null: nobody's, as that of the first start."""

    type: Literal["user", "service_account"] | None = None
    object: str | None = None
    id: str | None = None
    name: str | None = None
    created_at: int | None = None
    role: str | None = None


class AdminKey(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["organization.admin_api_key"] = "organization.admin_api_key"
    name: str
    redacted_value: str
    created_at: int
    last_used_at: int | None
    expires_at: int | None
    owner: AdminKeyOwner


class CreatedAdminKey(AdminKey, frozen=True, kw_only=True):
    """A key, with its secret this once."""

    value: str

    def __repr__(self) -> str:
        return f"CreatedAdminKey({self.id})"


@with_fields(sorted(PROJECT_LIMITS.values()), int)
class RateLimit(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["project.rate_limit"] = "project.rate_limit"
    model: str
