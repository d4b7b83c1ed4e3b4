"""Several endpoints say alike what is left of what was asked for, and never say some things."""

from __future__ import annotations

import pytest

from gateway.auth.oauth.authority import MAX_SCOPES, IssuedTokens, narrowed_scopes
from gateway.auth.oauth.client_authentication import PresentedCredentials
from gateway.auth.oauth.rfc6749_errors import OAuthError
from tests.gateway.auth.world import World, error_of


@pytest.mark.parametrize(
    ("asked", "granted"),
    [
        ("inference admin:*", ["inference"]),
        ("inference ", ["inference"]),
        ("", ["inference"]),
        (" ".join(["inference"] * 2 + [f"s{n}" for n in range(MAX_SCOPES)]), ["inference"]),
        (None, []),
    ],
)
def test_more_than_was_granted_is_refused_and_so_is_nothing(
    asked: str | None, granted: list[str]
) -> None:
    with pytest.raises(OAuthError) as refused:
        narrowed_scopes(asked, granted)
    assert refused.value.error == "invalid_scope"


def test_a_part_of_what_was_granted_is_given_in_its_order() -> None:
    granted = ["usage:read", "inference", "openid"]
    assert narrowed_scopes("openid inference openid", granted) == ["inference", "openid"]
    assert narrowed_scopes(None, granted) == sorted(granted)


async def test_scopes_of_a_person_alone_are_nothing_for_a_client_without_one(world: World) -> None:
    client, _ = await world.client(grants=["client_credentials"], scopes=["openid", "email"])
    asking = world.ask(client, grant_type="client_credentials")
    assert await error_of(asking) == "invalid_scope"


def test_what_would_print_them_shows_no_secret() -> None:
    answer = IssuedTokens(
        access_token="token-1", token_type="Bearer", expires_in=600, scope="", id_token="token-2"
    )
    presented = PresentedCredentials("client_secret_post", "client_1", "tg-secret-1")
    assert (repr(answer), repr(presented)) == (
        "IssuedTokens(Bearer)",
        "PresentedCredentials(client_secret_post)",
    )
