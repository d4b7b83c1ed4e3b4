"""Names the keys in Redis.

All of an organization's share one hash tag, so one slot of a cluster.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.limits.redis.scope_limits import ScopeLimits

GATEWAYS = "tollgate:gateways"
"""The serving gateways: process id -> time of its last heartbeat, in Unix seconds."""


def epoch_key(org_id: str) -> str:
    return f"tollgate:{{{org_id}}}:epoch"


def org_keys(org_id: str) -> list[str]:
    """Return what each script takes first: the org's open leases, the prefix of their records, its
    epoch."""
    tag = f"tollgate:{{{org_id}}}"
    return [f"{tag}:leases", f"{tag}:lease:", f"{tag}:epoch"]


def scope_keys(org_id: str, scopes: Sequence[ScopeLimits]) -> list[str]:
    return [f"tollgate:{{{org_id}}}:{scope.scope}:{scope.owner_id}" for scope in scopes]


def org_of(key: str) -> str:
    return key[key.index("{") + 1 : key.index("}")]
