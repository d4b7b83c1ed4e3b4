"""The policy by itself: who may what, for every role, scope and kind of org."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.permissions import (
    ADMIN_SCOPES,
    IDENTITY_SCOPES,
    KEY_SCOPES,
    OPERATOR_SCOPES,
    PROJECT_OWNER,
    SCOPES,
    SCOPES_OF,
    SERVICE_SCOPES,
    common,
    expanded,
    may,
    may_appoint,
    may_give,
    within,
)
from gateway.principal import Principal, Role

ROLES: tuple[Role, ...] = get_args(Role)
ABOVE: dict[Role, tuple[Role, ...]] = {
    "reader": ("billing", "developer", "admin", "owner"),
    "billing": ("admin", "owner"),
    "developer": ("admin", "owner"),
    "admin": ("owner",),
    "owner": (),
}
UNKNOWN = ("", "admin:", "admin:nothing", "operator:*", "admin:projects:x", "INFERENCE", "*")
any_scope = st.sampled_from(sorted(SCOPES) + list(UNKNOWN))
any_scopes = st.frozensets(any_scope)


def principal(
    scopes: frozenset[str],
    role: Role | None = None,
    *,
    is_operator: bool = False,
    owned: frozenset[str] = frozenset(),
) -> Principal:
    return Principal(
        org_id="o", project_id="p", key_id="k", key_hint="", scopes=scopes, role=role,
        is_operator=is_operator, owned_projects=owned,
    )  # fmt: skip


any_projects = st.frozensets(st.sampled_from(("p", "q", "r")))
principals = st.builds(
    principal,
    any_scopes,
    st.sampled_from((None, *ROLES)),
    is_operator=st.booleans(),
    owned=any_projects,
)


def powers(who: Principal, project_id: str | None = None) -> frozenset[str]:
    return frozenset(scope for scope in SCOPES if may(who, scope, project_id=project_id))


def test_every_role_has_its_scopes_and_no_scope_is_of_nobody() -> None:
    assert set(SCOPES_OF) == set(ROLES) == set(ABOVE)
    kinds = (SERVICE_SCOPES, ADMIN_SCOPES, OPERATOR_SCOPES, IDENTITY_SCOPES, {"usage:read"})
    assert frozenset().union(*kinds) == SCOPES and sum(map(len, kinds)) == len(SCOPES)
    assert KEY_SCOPES == SCOPES - IDENTITY_SCOPES
    assert powers(principal(SCOPES, "owner", is_operator=True)) == SCOPES


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("is_operator", [False, True])
def test_what_each_role_may_stands_here(role: Role, is_operator: bool) -> None:
    reads = {"admin:read", "usage:read"} | IDENTITY_SCOPES
    expected = {
        "reader": reads,
        "billing": reads | {"admin:billing"},
        "developer": reads | {"inference", "mcp:call"},
        "admin": reads | SERVICE_SCOPES | ADMIN_SCOPES - {"admin:*", "admin:issuers"},
        "owner": SCOPES if is_operator else SCOPES - OPERATOR_SCOPES,
    }[role]
    assert powers(principal(SCOPES, role, is_operator=is_operator)) == expected
    assert within(role, SCOPES, is_operator=is_operator) == expected


@given(any_scopes, st.booleans(), any_scope)
def test_a_higher_role_may_no_less(scopes: frozenset[str], is_operator: bool, scope: str) -> None:
    for role, above in ABOVE.items():
        if may(principal(scopes, role, is_operator=is_operator), scope):
            for higher in above:
                assert may(principal(scopes, higher, is_operator=is_operator), scope)


@given(principals, any_scopes)
def test_more_scopes_may_no_less(who: Principal, more: frozenset[str]) -> None:
    richer = principal(who.scopes | more, who.role, is_operator=who.is_operator)
    assert powers(who) <= powers(richer)


@given(principals)
def test_a_credential_never_has_more_than_its_owner_nor_than_it_holds(who: Principal) -> None:
    alone = principal(who.scopes, None, is_operator=who.is_operator)
    assert powers(who) <= powers(alone)
    if who.role is not None:
        owner = principal(SCOPES_OF[who.role], None, is_operator=who.is_operator)
        assert powers(who) == powers(alone) & powers(owner)
        assert within(who.role, SCOPES, is_operator=who.is_operator) == powers(owner)


@given(principals)
def test_scopes_confer_themselves_and_admin_star_alone_confers_others(who: Principal) -> None:
    conferred = powers(who) - who.scopes
    if "admin:*" not in who.scopes:
        assert conferred == frozenset()
    assert conferred <= ADMIN_SCOPES | OPERATOR_SCOPES | {"usage:read"}


@given(any_scopes, any_scopes, st.booleans())
def test_what_two_hold_in_common_confers_what_both_confer(
    one: frozenset[str], other: frozenset[str], is_operator: bool
) -> None:
    both = powers(principal(common(one, other), is_operator=is_operator))
    shared = powers(principal(one, is_operator=is_operator)) & powers(
        principal(other, is_operator=is_operator)
    )
    assert both <= shared and shared - both <= OPERATOR_SCOPES
    assert powers(principal(expanded(one), is_operator=is_operator)) == powers(
        principal(one, is_operator=is_operator)
    )


@given(principals, st.sampled_from(UNKNOWN))
def test_a_scope_that_nobody_declared_is_conferred_by_nothing(who: Principal, scope: str) -> None:
    assert not may(who, scope) and not may_give(who, [scope])


@given(principals)
def test_the_installation_is_changed_from_an_operator_org_alone(who: Principal) -> None:
    if not who.is_operator:
        assert powers(who) & OPERATOR_SCOPES == frozenset()


@given(principals, any_scopes)
def test_what_is_made_never_administers_more_than_who_made_it(
    who: Principal, scopes: frozenset[str]
) -> None:
    freely = SERVICE_SCOPES | IDENTITY_SCOPES
    if may_give(who, scopes):
        made = principal(scopes, None, is_operator=who.is_operator)
        assert powers(made) <= powers(who) | freely
    else:
        assert scopes - powers(who) - freely


def test_who_may_appoint_whom_stands_here() -> None:
    appointed = {
        role: {each for each in ROLES if may_appoint(principal(SCOPES, role), each)}
        for role in ROLES
    }
    assert appointed == {
        "owner": set(ROLES),
        "admin": set(ROLES) - {"owner"},
        "billing": {"billing", "developer", "reader"},
        "developer": {"developer", "reader"},
        "reader": {"developer", "reader"},
    }, "the use of models is given freely, by whose scopes let them appoint at all"
    first_admin_key = principal(frozenset({"admin:*", "usage:read"}))
    assert all(may_appoint(first_admin_key, role) for role in ROLES)
    assert may_give(first_admin_key, ["inference", "mcp:call", "admin:*"])
    assert not may_give(principal(frozenset({"admin:keys"})), ["usage:read"])


@given(principals, st.sampled_from(("p", "q", "r", "")))
def test_owning_a_project_confers_its_administration_and_nothing_outside(
    who: Principal, project_id: str
) -> None:
    """An owner gets of it what the credential holds; in what is not owned, and in the org, it is as
    if nothing were."""
    nothing = msgspec.structs.replace(who, owned_projects=frozenset())
    assert powers(who) == powers(nothing), "in the org"
    more = powers(who, project_id) - powers(who)
    if project_id not in who.owned_projects:
        assert more == frozenset()
    elif who.role is not None:
        alone = principal(who.scopes, None, is_operator=who.is_operator)
        assert powers(who, project_id) == powers(who) | (PROJECT_OWNER & powers(alone))
    assert powers(who) <= powers(who, project_id)
    assert more <= PROJECT_OWNER


@given(st.sampled_from(ROLES), any_scopes, st.booleans())
def test_who_owns_a_project_may_be_given_its_scopes(
    role: Role, scopes: frozenset[str], is_operator: bool
) -> None:
    alone = within(role, scopes, is_operator=is_operator)
    owning = within(role, scopes, is_operator=is_operator, owns_project=True)
    assert owning == alone | (PROJECT_OWNER & scopes)


def test_what_an_owner_of_a_project_may_stands_here() -> None:
    areas = ("projects", "members", "keys", "billing", "content")
    wanted = {f"admin:{area}" for area in areas}
    assert wanted == PROJECT_OWNER
    reader = principal(SCOPES, "reader", owned=frozenset({"p"}))
    assert powers(reader, "p") - powers(reader) == wanted
    assert not may_give(reader, ["admin:keys"]), "owning is of a person, not theirs to give"
    assert not may_appoint(reader, "billing")
