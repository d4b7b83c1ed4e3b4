"""Says who is sent e-mail about what: topics, the roles that each is for, and what a person has
switched on or off. Only users of a live organization are sent any: neither an archived user nor
somebody whose invite is open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import Actor, record
from gateway.principal import Role
from gateway.tenancy.errors import InvalidField
from gateway.tenancy.member_tables import users
from gateway.tenancy.members.users import User, lock_user

Topic = Literal[
    "budgets", "credits", "invoices", "payments", "approvals", "batches", "rate_limits", "disputes"
]


class TopicRule(NamedTuple):
    """Whom a topic is for."""

    about: str
    """Completes "E-mail about ..."."""
    roles: frozenset[Role]
    by_default: bool = True
    for_operators: bool = False
    """True if it is for people of the operator's organization alone."""


_MONEY: frozenset[Role] = frozenset(("owner", "admin", "billing"))
_CHIEFS: frozenset[Role] = frozenset(("owner", "admin"))
TOPICS: Mapping[Topic, TopicRule] = {
    "budgets": TopicRule("budgets that reach 50, 80 and 100 %, and unusual spending", _MONEY),
    "credits": TopicRule("credit that runs low, and top-ups", _MONEY),
    "invoices": TopicRule("invoices and their payment", frozenset(("owner", "billing"))),
    "payments": TopicRule(
        "top-ups of customers that wait for a payment",
        frozenset(("owner", "billing")),
        for_operators=True,
    ),
    "approvals": TopicRule("tool calls that wait for an approval", _CHIEFS),
    "batches": TopicRule("batches that end", _CHIEFS, by_default=False),
    "rate_limits": TopicRule("rate limits that are nearly used", _CHIEFS, by_default=False),
    "disputes": TopicRule("usage that an upstream claims in error", _CHIEFS, by_default=False),
}


def is_wanted(topic: Topic, role: str, choices: Mapping[str, bool]) -> bool:
    """True if somebody of this role who chose so is sent e-mail about a topic."""
    rule = TOPICS[topic]
    return role in rule.roles and choices.get(topic, rule.by_default)


def topics_of(
    role: str, choices: Mapping[str, bool], *, is_operator: bool = False
) -> dict[Topic, bool]:
    """Return the topics that are for somebody of this role, and whether each is sent to them."""
    return {
        topic: is_wanted(topic, role, choices)
        for topic, rule in TOPICS.items()
        if role in rule.roles and (is_operator or not rule.for_operators)
    }


async def choose_mail(
    conn: AsyncConnection, *, org_id: str, user_id: str, choices: Mapping[str, bool], actor: Actor
) -> User:
    """Switch topics on or off for a user; others stay as they are.

    Raises: InvalidField, NotFound.
    """
    strange = sorted({*choices} - {*get_args(Topic)})
    if strange:
        raise InvalidField("mail", f"there is no topic {strange[0]!r}")
    before = await lock_user(conn, org_id=org_id, user_id=user_id)
    wanted = {**before.mail_choices, **choices}
    if wanted == before.mail_choices:
        return before
    changed = sa.update(users).where(users.c.org_id == org_id, users.c.id == user_id)
    columns = [users.c[field] for field in User.__struct_fields__]
    row = (await conn.execute(changed.values(mail_choices=wanted).returning(*columns))).one()
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="user.updated",
        target=user_id,
        before={"mail": before.mail_choices},
        after={"mail": wanted},
    )
    return User(**row._mapping)
