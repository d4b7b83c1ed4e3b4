"""Decides what a credential may make that outlives it: keys and clients. Pure.

Which scopes may be given is `policy`'s; here stands for how long and to whom:

- A credential of administration is of whoever made it: it goes when they go, and is demoted with
  them. Who acts for somebody makes one for themselves alone, and neither takes over nor widens what
  is somebody else's or nobody's. A key that is nobody's makes what is nobody's; a token that acts
  for nobody, a client's or a foreign issuer's, makes nothing that administers.
- A key that is bound to networks, models or a time makes and changes nothing beyond them, and
  appoints nobody (`policy.may_appoint`). No key changes itself.
- What is for inference and tools belongs to its project, not to whoever made it: it stays until it
  is revoked. So do people: who was let in by an admin is removed by an admin.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from gateway.networks import Networks
from gateway.permissions import ADMIN, OPERATOR, is_bound
from gateway.principal import Principal
from gateway.tenancy.errors import NotAllowed


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """None: not bound there."""

    networks: Networks | None = None
    models: frozenset[str] | None = None
    expires_at: float | None = None
    """Unix seconds."""

    def beyond(self, outer: Bounds) -> str | None:
        """The field, if any, in which this reaches beyond `outer`."""
        if outer.networks is not None and not (
            self.networks is not None and outer.networks.covers(self.networks)
        ):
            return "ip_ranges"
        if outer.models is not None and not (
            self.models is not None and self.models <= outer.models
        ):
            return "models"
        if outer.expires_at is not None and not (
            self.expires_at is not None and self.expires_at <= outer.expires_at
        ):
            return "expires_at"
        return None


class Owner(msgspec.Struct, frozen=True):
    user_id: str | None = None
    service_account_id: str | None = None


NOBODY = Owner()


class Power(msgspec.Struct, frozen=True, kw_only=True):
    """The power of a key, for anybody who has it."""

    scopes: Collection[str]
    owner: Owner
    bounds: Bounds


def administers(scopes: Iterable[str]) -> bool:
    return any(scope.startswith((ADMIN, OPERATOR)) for scope in scopes)


def bounds_of(maker: Principal) -> Bounds:
    """A token's few minutes are no bound: who it acts for gets the next one."""
    if not is_bound(maker):
        return Bounds()
    return Bounds(
        networks=maker.allowed_networks, models=maker.key_models, expires_at=maker.expires_at
    )


def owner_of_new(maker: Principal, scopes: Iterable[str], asked: Owner) -> Owner:
    """Return the owner of a new key: of an admin key, the one that its maker acts for.

    Raises: NotAllowed.
    """
    own = _acts_for(maker)
    if not administers(scopes) or own == NOBODY:
        return asked
    if asked not in (NOBODY, own):
        raise NotAllowed("user_id", "an admin key is of whoever makes it")
    return own


def check_secret(maker: Principal, power: Power) -> None:
    """Check that `maker` may read the secret of a key, new or rotated, of that power.

    Raises: NotAllowed.
    """
    _check_bounds(maker, power.bounds)
    if administers(power.scopes):
        check_owner(maker, power.owner)


def check_changed(maker: Principal, key_id: str, before: Power, after: Power) -> None:
    """Raises: NotAllowed."""
    if maker.kind == "key" and maker.key_id == key_id:
        raise NotAllowed("key_id", "a key does not change itself")
    _check_bounds(maker, after.bounds)
    wider = not set(after.scopes) <= set(before.scopes) or after.bounds.beyond(before.bounds)
    if wider and administers(after.scopes):
        check_owner(maker, before.owner)


def _acts_for(maker: Principal) -> Owner:
    return Owner(maker.user_id, maker.service_account_id)


def _check_bounds(maker: Principal, wanted: Bounds) -> None:
    beyond = wanted.beyond(bounds_of(maker))
    if beyond is not None:
        raise NotAllowed(beyond, "this key is bound to less itself")


def check_owner(maker: Principal, owner: Owner, field: str = "scopes") -> None:
    own = _acts_for(maker)
    if own == NOBODY and maker.kind != "key":
        raise NotAllowed(field, "this token acts for nobody, whose what administers could be")
    if own not in (NOBODY, owner):
        raise NotAllowed(field, "what administers would not go with whom this acts for")
