"""Login through an issuer that keeps a person's address out of its ID tokens, as OpenID Connect
Core, 5.4, has it: it is asked for with the access token that came along."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.net.egress import FetchResponse
from tests.gateway.auth.federation.federating import world
from tests.gateway.auth.federation.test_external_login import EMAIL, LoginFlow, desk
from tests.gateway.auth.issuing import ISSUER

__all__ = ["desk", "world"]

USERINFO = f"{ISSUER}/userinfo"
WITHOUT = {"email": None, "email_verified": None}


async def begin_with_userinfo(desk: LoginFlow, told: Any, **more: Any) -> dict[str, str]:
    """A login at an issuer that keeps who it is out of its ID tokens (OpenID Connect Core, 5.4)."""
    desk.world.issuer.publish(userinfo_endpoint=USERINFO)
    await desk.list_it()
    asked = await desk.start()
    desk.answers(asked, **(WITHOUT | more))
    desk.world.far_end.says(USERINFO, told)
    return asked


async def test_an_address_is_asked_for_where_the_id_token_has_none(desk: LoginFlow) -> None:
    user_id = await desk.add_user()
    told = {"sub": "someone", "email": EMAIL, "email_verified": True}
    asked = await begin_with_userinfo(desk, told)
    assert (await desk.finish(asked)).user_id == user_id
    assert desk.world.far_end.shown == ["x"], "the access token that came with the ID token"
    assert USERINFO in desk.world.far_end.asked


@pytest.mark.parametrize(
    ("told", "more", "match"),
    [
        ({"sub": "another", "email": EMAIL, "email_verified": True}, {}, "another subject"),
        ({"email": EMAIL, "email_verified": True}, {}, "another subject"),
        ({"sub": "someone", "email": EMAIL, "email_verified": False}, {}, "without a verified"),
        # That some address is verified says nothing about this one.
        ({"sub": "someone", "email": EMAIL}, {"email_verified": True}, "without a verified"),
        ([], {}, "userinfo"),
    ],
)
async def test_nobody_is_known_by_what_the_issuer_says_of_others(
    desk: LoginFlow, told: Any, more: dict[str, Any], match: str
) -> None:
    await desk.add_user()
    asked = await begin_with_userinfo(desk, told, **more)
    await desk.refused(asked, match)


async def test_an_issuer_that_does_not_say_who_it_is_signs_nobody_in(desk: LoginFlow) -> None:
    await desk.add_user()
    asked = await begin_with_userinfo(desk, {})
    desk.world.far_end.says(USERINFO, {}, status=401)
    await desk.refused(asked, "userinfo: status 401")
    desk.world.far_end.fails(USERINFO)
    await desk.refused(asked, "userinfo: EgressFailed")
    # A token that could write a header of its own is shown to nobody.
    bad = desk.world.far_end.answers[f"{ISSUER}/token"]
    assert isinstance(bad, FetchResponse)
    desk.world.far_end.says(
        f"{ISSUER}/token", bad.json_object() | {"access_token": "x\r\nhost: evil"}
    )
    await desk.refused(asked, "without a verified")
