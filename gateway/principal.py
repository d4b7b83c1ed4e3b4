"""Defines `Principal`: who is calling and what they may spend; made by `auth`, read by everything
behind it. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from billing.pricing.entries import DEFAULT_LIST
from billing.pricing.lists import ListName
from engine.protocol import Lane
from gateway.networks import Networks

SCOPE_INFERENCE = "inference"
SCOPE_USAGE_READ = "usage:read"
SCOPE_ADMIN = "admin:*"


CredentialKind = Literal["key", "token", "session"]
"""An API key, an access token, or somebody who is signed in with a browser."""
KeyLane = Literal["agentic", "batch"]
"""A key can be marked for a lower lane than its requests would be in, never for a higher one."""
KEY_LANES: tuple[KeyLane, ...] = get_args(KeyLane)
Role = Literal["owner", "admin", "developer", "billing", "reader"]


MAX_LIMIT = 1_000_000_000_000
MINUTE_US = 60_000_000
DAY_US = 24 * 60 * MINUTE_US
Amount = Annotated[int, Meta(ge=0, le=MAX_LIMIT)]
Weight = Annotated[float, Meta(ge=1 / 64, le=64)]


class PlanLimit(msgspec.Struct, frozen=True):
    """Describes one limit of a plan. Settings, tables, the admin API, buckets, headers, errors and
    alerts are made of it; it stands beside its field of `Plan`."""

    letter: str
    """Its bucket's name in Redis."""
    kind: str
    """Its name in errors and, where its window is a minute, in headers."""
    title: str
    """Its name in messages to people."""
    name: str = ""
    """Its field of `Plan`."""
    counts: str = ""
    """A key of `limits.outcomes.Units.counted`, or "streams": the requests that run at once. Its
    kind, unless said otherwise."""
    window_us: int = MINUTE_US
    """0: it has none, and no bucket."""
    lane: Lane | None = None
    """The only lane in which it holds."""
    of_keys: bool = False
    """A key may have it of its own, beside that of its plan."""
    openai_name: str | None = None
    """OpenAI's name of it where a project has it of its own for a model. None: it cannot."""
    raises_alerts: bool = False
    """Its use in a minute raises them, in tokens."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Limits of one scope (a key, a project, an OAuth client or an org). None: unlimited."""

    name: str
    tokens_per_minute: Annotated[
        Amount | None,
        PlanLimit(
            *("t", "tokens", "tokens per minute (TPM)"),
            of_keys=True,
            openai_name="max_tokens_per_1_minute",
            raises_alerts=True,
        ),
    ] = None
    requests_per_minute: Annotated[
        Amount | None,
        PlanLimit(
            *("r", "requests", "requests per minute (RPM)"),
            of_keys=True,
            openai_name="max_requests_per_1_minute",
        ),
    ] = None
    max_concurrent_streams: Annotated[
        Amount | None, PlanLimit("s", "streams", "concurrent requests", window_us=0, of_keys=True)
    ] = None
    input_tokens_per_minute: Annotated[
        Amount | None,
        PlanLimit("i", "input_tokens", "input tokens per minute", raises_alerts=True),
    ] = None
    output_tokens_per_minute: Annotated[
        Amount | None,
        PlanLimit("o", "output_tokens", "output tokens per minute", raises_alerts=True),
    ] = None
    batch_tokens_per_day: Annotated[
        Amount | None,
        PlanLimit(
            *("d", "batch_tokens", "batch tokens per day (TPD)"),
            counts="tokens",
            window_us=DAY_US,
            lane="batch",
        ),
    ] = None
    weight: Weight | None = None
    """An org's share among others in a lane: twice the weight, twice the share when all wait. None:
    1."""
    lane: Lane | None = None
    """The lane of all its requests. None: each request's own lane."""
    price_list: ListName | None = None
    """The price list that its org pays by. None: the default list."""


PLAN_LIMITS = tuple(
    msgspec.structs.replace(each, name=field.name, counts=each.counts or each.kind)
    for field in msgspec.structs.fields(Plan)
    for each in getattr(field.type, "__metadata__", ())
    if isinstance(each, PlanLimit)
)
LIMIT_NAMES = tuple(limit.name for limit in PLAN_LIMITS)
KEY_LIMIT_NAMES = tuple(limit.name for limit in PLAN_LIMITS if limit.of_keys)
"""The limits that a key may have of its own, too."""
PROJECT_LIMITS = {limit.name: limit.openai_name for limit in PLAN_LIMITS if limit.openai_name}
"""The limits that a project may have of its own for a model, too, with OpenAI's names."""
UNLIMITED = Plan(name="unlimited")

CapScope = Literal["org", "project", "key"]
CapPeriod = Literal["day", "month", "total"]


class SpendCap(msgspec.Struct, frozen=True, gc=False):
    """A hard cap: what its owner may spend in a period (UTC), in nano-USD."""

    scope: CapScope
    owner_id: str
    period: CapPeriod
    amount_nano: int
    is_funded: bool = False
    """No more than has been leased of what it has paid in advance, either."""


class OrgSuspended(Exception):
    """The org of a principal has not paid an invoice."""

    def __init__(self, number: str) -> None:
        super().__init__(number)
        self.number = number


class Principal(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An authenticated caller. Ids are strings with their kind as prefix (`org_...`, `proj_...`,
    `key_...`). A worker keeps thousands; the garbage collector need not look at them, which are
    part of no cycle."""

    org_id: str
    org_name: str = ""
    """The name that people know it by. Empty: it was not looked up."""
    project_id: str
    """Empty where an admin key is of the whole org."""
    project_name: str = ""
    key_id: str
    key_hint: str
    """Prefix and last four, for people and logs; never the key."""
    scopes: frozenset[str]
    key_lane: KeyLane | None = None
    """Its requests are in no lane above."""
    key_plan: Plan = UNLIMITED
    project_plan: Plan = UNLIMITED
    org_plan: Plan = UNLIMITED
    model_plans: Mapping[str, Plan] = {}
    """By model, what its project may use of it."""
    key_model_plans: Mapping[str, Plan] = {}
    """By model, what the key itself may use of it, within `key_plan`."""
    client_plan: Plan = UNLIMITED
    """The limits of the OAuth client, shared by all users it acts for."""
    spend_caps: tuple[SpendCap, ...] = ()
    """The hard ones of its key, its project and its org."""
    shows_cost: bool = False
    """Its answers say what they cost, where the request says nothing of it."""
    zero_retention: bool = False
    """Its project keeps nothing of what it asks and is answered."""
    store_content: bool = False
    """Its project stores the texts of requests and answers beside the log of requests."""
    expires_at: float | None = None
    """Unix seconds."""
    kind: CredentialKind = "key"
    role: Role | None = None
    """The role of the user or service account that the credential acts for; None: it acts for none,
    and only its scopes count."""
    owned_projects: frozenset[str] = frozenset()
    """The projects of its org that the user or service account owns."""
    user_id: str | None = None
    service_account_id: str | None = None
    client_id: str | None = None
    """The OAuth client that an access token was issued to; then `key_id` is the same."""
    agent_ids: frozenset[str] = frozenset()
    """Service accounts of the clients that act for somebody else with it (RFC 8693)."""
    grant_id: str | None = None
    audiences: frozenset[str] = frozenset()
    """The audiences that an access token is valid for (RFC 9068 `aud`)."""
    is_operator: bool = False
    """Its org runs the installation."""
    suspended_by: str | None = None
    """The number of the invoice for which its org is served no longer."""
    allowed_models: frozenset[str] | None = None
    """None: all that are served."""
    denied_models: frozenset[str] = frozenset()
    key_models: frozenset[str] | None = None
    """The part of `allowed_models` that the key itself is bound to."""
    allowed_networks: Networks | None = None
    """The networks that it may be used from. None: any."""

    @property
    def actor_kind(self) -> Literal["api_key", "client", "user"]:
        """Return the kind of the credential as the audit log names it."""
        if self.kind == "session":
            return "user"
        return "api_key" if self.kind == "key" else "client"

    @property
    def acts_for(self) -> str | None:
        """Return whom the credential acts for, beside itself."""
        return None if self.kind == "session" else self.user_id or self.service_account_id

    @property
    def keeps_nothing(self) -> bool:
        """Or it is of no project, whose it could be."""
        return self.zero_retention or not self.project_id

    @property
    def stores_content(self) -> bool:
        """Tell whether the texts of its requests and answers are stored beside the log of
        requests."""
        return self.store_content and not self.keeps_nothing

    @property
    def price_list(self) -> str:
        return self.org_plan.price_list or DEFAULT_LIST

    def check_served(self) -> None:
        """Raises: OrgSuspended."""
        if self.suspended_by is not None:
            raise OrgSuspended(self.suspended_by)

    def may_use(self, model: str) -> bool:
        allowed = self.allowed_models
        return (allowed is None or model in allowed) and model not in self.denied_models
