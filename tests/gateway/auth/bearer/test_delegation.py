"""Chains of credentials that make credentials: nobody ends with more than they had, and what
administers goes with whom it was made by."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.auth.oauth.clients.metadata import AUTHORIZATION_CODE, CLIENT_CREDENTIALS
from gateway.auth.oauth.clients.store import check_client
from gateway.networks import Networks
from gateway.permissions import KEY_SCOPES, SCOPES_OF, SERVICE_SCOPES, is_bound, may_give
from gateway.principal import Principal, Role
from gateway.tenancy import delegation
from gateway.tenancy.delegation import NOBODY, Bounds, Owner, Power, administers
from gateway.tenancy.errors import NotAllowed
from tests.budget import examples

ME = Owner("user_me")
OWNERS = (NOBODY, ME, Owner("user_other"), Owner(None, "svc_acct_1"))
NETWORKS = [None, *map(Networks.of, (["10.0.0.0/8"], ["10.1.0.0/16", "2001:db8::/32"], ["::1"]))]
MODELS = [None, frozenset({"a"}), frozenset({"a", "b"})]
TIMES = [None, 100.0, 200.0]
bounds = st.builds(
    Bounds,
    networks=st.sampled_from(NETWORKS),
    models=st.sampled_from(MODELS),
    expires_at=st.sampled_from(TIMES),
)
scopes = st.frozensets(st.sampled_from(sorted(KEY_SCOPES)), min_size=1, max_size=4)
powers = st.builds(Power, scopes=scopes, owner=st.sampled_from(OWNERS), bounds=bounds)


def holder(key_id: str, power: Power, role: Role | None) -> Principal:
    """Return the principal that shows a key of that power."""
    return Principal(
        org_id="o",
        project_id="p",
        key_id=key_id,
        key_hint="",
        scopes=frozenset(power.scopes),
        role=None if power.owner == NOBODY else role,
        user_id=power.owner.user_id,
        service_account_id=power.owner.service_account_id,
        allowed_networks=power.bounds.networks,
        key_models=power.bounds.models,
        expires_at=power.bounds.expires_at,
    )


def token(role: Role | None, owner: Owner = NOBODY) -> Principal:
    made = holder("client_1", Power(scopes=KEY_SCOPES, owner=owner, bounds=Bounds()), role)
    return msgspec.structs.replace(made, kind="token", expires_at=600.0, role=role)


def inherited(maker: Principal, wanted: Bounds) -> Bounds:
    """As a new key is made: where nothing was said, what binds its maker."""
    own = delegation.bounds_of(maker)
    said = {name: getattr(wanted, name) or getattr(own, name) for name in Bounds.__struct_fields__}
    return Bounds(**said)


class Chain:
    """The powers that somebody gets hold of, step by step, from what they begin with, in an org
    with keys of others whose secrets they have not seen."""

    def __init__(self, first: Principal, others: list[Power], role: Role) -> None:
        self.role = role
        self.first = first
        self.keys: dict[str, Power] = {f"key_{n}": power for n, power in enumerate(others)}
        self.seen: set[str] = set()

    def held(self) -> list[Principal]:
        return [self.first, *(holder(key, self.keys[key], self.role) for key in sorted(self.seen))]

    def make(self, maker: Principal, wanted: Power) -> None:
        if not may_give(maker, wanted.scopes):
            return
        owner = delegation.owner_of_new(maker, wanted.scopes, wanted.owner)
        power = Power(scopes=wanted.scopes, owner=owner, bounds=inherited(maker, wanted.bounds))
        delegation.check_secret(maker, power)
        key_id = f"key_{len(self.keys)}"
        self.keys[key_id] = power
        self.seen.add(key_id)

    def rotate(self, maker: Principal, key_id: str) -> None:
        if may_give(maker, self.keys[key_id].scopes):
            delegation.check_secret(maker, self.keys[key_id])
            self.seen.add(key_id)

    def change(self, maker: Principal, key_id: str, wanted: Power) -> None:
        before = self.keys[key_id]
        if may_give(maker, before.scopes) and may_give(maker, wanted.scopes):
            # What a key is for at all stays, as its prefix does.
            if administers(wanted.scopes) == administers(before.scopes):
                after = msgspec.structs.replace(wanted, owner=before.owner)
                delegation.check_changed(maker, key_id, before, after)
                self.keys[key_id] = after


steps = st.lists(
    st.tuples(
        st.sampled_from(("make", "rotate", "change")),
        st.integers(0, 20),
        st.integers(0, 20),
        powers,
    ),
    max_size=12,
)


def walk(chain: Chain, taken: list[tuple[str, int, int, Power]]) -> None:
    for verb, by, which, wanted in taken:
        held = chain.held()
        maker, keys = held[by % len(held)], sorted(chain.keys)
        try:
            if verb == "make":
                chain.make(maker, wanted)
            elif keys and verb == "rotate":
                chain.rotate(maker, keys[which % len(keys)])
            elif keys:
                chain.change(maker, keys[which % len(keys)], wanted)
        except NotAllowed:
            continue


@settings(max_examples=examples(300))
@given(st.sampled_from(get_args(Role)), st.lists(powers, max_size=3), steps)
def test_what_administers_goes_with_whoever_made_it(
    role: Role, others: list[Power], taken: list[tuple[str, int, int, Power]]
) -> None:
    chain = Chain(token(role, ME), others, role)
    walk(chain, taken)
    left = [chain.keys[key] for key in chain.seen if chain.keys[key].owner != ME]
    assert not any(administers(power.scopes) for power in left), "they are gone, this is not"
    for power in map(chain.keys.__getitem__, chain.seen):
        assert frozenset(power.scopes) <= SCOPES_OF[role] | SERVICE_SCOPES


@settings(max_examples=examples(300))
@given(st.sampled_from((None, "admin")), st.lists(powers, max_size=3), steps)
def test_a_token_that_acts_for_nobody_makes_nothing_that_administers(
    role: Role | None, others: list[Power], taken: list[tuple[str, int, int, Power]]
) -> None:
    chain = Chain(token(role), others, "owner")
    walk(chain, taken)
    assert not any(administers(chain.keys[key].scopes) for key in chain.seen)


@settings(max_examples=examples(300))
@given(powers, st.lists(powers, max_size=3), steps)
def test_what_a_bound_key_makes_or_changes_lies_within_its_bounds(
    first: Power, others: list[Power], taken: list[tuple[str, int, int, Power]]
) -> None:
    chain = Chain(holder("key_first", first, "owner"), others, "owner")
    before = dict(chain.keys)
    walk(chain, taken)
    touched = {key for key, power in chain.keys.items() if before.get(key) != power}
    for key in touched | chain.seen:
        assert chain.keys[key].bounds.beyond(first.bounds) is None
        assert may_give(chain.first, chain.keys[key].scopes)


INNER, OUTER, ASIDE = (Networks.of([each]) for each in ("10.1.0.0/16", "10.0.0.0/8", "::1/128"))


@pytest.mark.parametrize(
    ("inner", "outer", "beyond"),
    [
        (Bounds(), Bounds(), None),
        (Bounds(networks=INNER), Bounds(networks=OUTER), None),
        (Bounds(networks=OUTER), Bounds(networks=INNER), "ip_ranges"),
        (Bounds(networks=ASIDE), Bounds(networks=OUTER), "ip_ranges"),
        (Bounds(), Bounds(networks=OUTER), "ip_ranges"),
        (Bounds(models=frozenset("a")), Bounds(models=frozenset("ab")), None),
        (Bounds(models=frozenset("ab")), Bounds(models=frozenset("a")), "models"),
        (Bounds(), Bounds(models=frozenset("a")), "models"),
        (Bounds(expires_at=1.0), Bounds(expires_at=2.0), None),
        (Bounds(expires_at=2.0), Bounds(expires_at=1.0), "expires_at"),
        (Bounds(), Bounds(expires_at=1.0), "expires_at"),
    ],
)
def test_what_reaches_beyond_is_named(inner: Bounds, outer: Bounds, beyond: str | None) -> None:
    assert inner.beyond(outer) == beyond


def test_what_a_key_of_nobodys_makes_is_whose_it_says_and_bound_as_it_is() -> None:
    free = Power(scopes=["inference"], owner=NOBODY, bounds=Bounds())
    bound = Power(scopes=["inference"], owner=NOBODY, bounds=Bounds(models=frozenset("a")))
    maker = holder("key_1", free, None)
    assert delegation.bounds_of(maker) == Bounds()
    assert delegation.owner_of_new(maker, ["inference"], ME) == ME
    delegation.check_secret(maker, bound)
    with pytest.raises(NotAllowed, match="bound to less") as caught:
        delegation.check_secret(holder("key_2", bound, None), free)
    assert caught.value.param == "models"


def test_no_key_changes_itself() -> None:
    power = Power(scopes=["admin:keys"], owner=NOBODY, bounds=Bounds())
    for key_id, fails in (("key_1", True), ("key_2", False)):
        narrowed = msgspec.structs.replace(power, bounds=Bounds(expires_at=1.0))
        if fails:
            with pytest.raises(NotAllowed, match="itself"):
                delegation.check_changed(holder(key_id, power, None), "key_1", power, narrowed)
        else:
            delegation.check_changed(holder(key_id, power, None), "key_1", power, narrowed)


def test_others_keys_are_narrowed_and_not_widened() -> None:
    one = Power(scopes=["admin:keys"], owner=NOBODY, bounds=Bounds(expires_at=100.0))
    me = token("owner", ME)
    for wider in ({"scopes": ["admin:keys", "admin:read"]}, {"bounds": Bounds()}):
        with pytest.raises(NotAllowed):
            changed: Any = msgspec.structs.replace(one, **wider)
            delegation.check_changed(me, "key_1", one, changed)
    less = msgspec.structs.replace(one, bounds=Bounds(expires_at=50.0))
    delegation.check_changed(me, "key_1", one, less)


@pytest.mark.parametrize(
    ("maker", "wanted", "field"),
    [
        (token("owner", ME), {}, "service_account_id"),
        (token("owner"), {}, "service_account_id"),
        (token("owner", ME), {"service_account_id": "svc_acct_1"}, None),
        (token("owner", ME), {"scopes": ["inference", "usage:read"]}, None),
        (token("owner", ME), {"grant_types": [AUTHORIZATION_CODE]}, None),
        (holder("key_1", Power(scopes=["admin:*"], owner=NOBODY, bounds=Bounds()), None), {}, None),
        (
            holder(
                "key_1",
                Power(scopes=["admin:*"], owner=NOBODY, bounds=Bounds(expires_at=9.0)),
                None,
            ),
            {"scopes": ["inference"]},
            "grant_types",
        ),
    ],
)
def test_a_client_that_comes_alone_is_somebodys_or_made_by_nobodys_key(
    maker: Principal, wanted: dict[str, Any], field: str | None
) -> None:
    asked = {
        "scopes": ["admin:read"],
        "grant_types": [CLIENT_CREDENTIALS],
        "service_account_id": None,
    } | wanted
    if field is None:
        check_client(maker, **asked)
        return
    with pytest.raises(NotAllowed) as refused:
        check_client(maker, **asked)
    assert refused.value.param == field


def test_a_tokens_minutes_bind_nothing() -> None:
    assert not is_bound(token("owner", ME)) and delegation.bounds_of(token("owner")) == Bounds()
    with pytest.raises(NotAllowed, match="whoever makes it"):
        delegation.owner_of_new(token("owner", ME), ["admin:keys"], Owner("user_other"))
