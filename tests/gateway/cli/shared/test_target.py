"""A command finds its gateway and its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.cli.shared.target import GatewayError, GatewayTarget, find_target, refusal
from gateway.processes import credentials_file
from gateway.processes.credentials_file import Credentials
from gateway.settings.load import Settings, load

OWN = Credentials(base_url="http://127.0.0.1:8123/v1", api_key="sk-api", admin_key="sk-admin")
AWAY = Credentials(base_url="http://10.0.0.1:8123/v1", api_key="sk-api", admin_key="sk-admin")


def home(folder: Path, known: Credentials | None = None) -> Settings:
    if known is not None:
        credentials_file.write(folder / "credentials.json", known)
    return load({"home": folder, "port": 8999}, {})


def test_the_homes_own_address_comes_before_the_settings(tmp_path: Path) -> None:
    target = find_target(home(tmp_path, OWN), url=None, port=None, key=None)
    assert (target.base, target.key) == ("http://127.0.0.1:8123", "sk-admin")
    assert target.why == str(tmp_path / "credentials.json")


def test_where_nothing_was_started_the_settings_say(tmp_path: Path) -> None:
    target = find_target(home(tmp_path), url=None, port=None, key=None)
    assert (target.base, target.key) == ("http://127.0.0.1:8999", None)


def test_a_port_is_of_the_homes_host_and_a_url_wins_over_both(tmp_path: Path) -> None:
    settings = home(tmp_path, OWN)
    target = find_target(settings, url=None, port=9000, key=None)
    assert (target.base, target.key) == ("http://127.0.0.1:9000", "sk-admin")
    target = find_target(settings, url="https://gateway.example.com/v1/", port=9000, key="mine")
    assert (target.base, target.key, target.why) == ("https://gateway.example.com", "mine", "--url")


@pytest.mark.parametrize(
    "url",
    ["https://gateway.example.com", "http://127.0.0.1.example.com:8123", "http://10.0.0.2:8123"],
)
@pytest.mark.parametrize("known", [OWN, AWAY])
def test_the_homes_key_goes_to_no_stranger(tmp_path: Path, known: Credentials, url: str) -> None:
    assert find_target(home(tmp_path, known), url=url, port=None, key=None).key is None


def test_the_homes_key_is_good_for_its_own_address_by_url(tmp_path: Path) -> None:
    settings = home(tmp_path, AWAY)
    assert find_target(settings, url="http://10.0.0.1:8123", port=None, key=None).key == "sk-admin"
    assert find_target(settings, url=None, port=9000, key=None).key is None


@pytest.mark.parametrize(
    "url", ["x", "ftp://x", "http://u:p@x", "http://x:0", "http://x?y", "http://"]
)
def test_what_is_no_url_of_a_gateway_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(GatewayError, match="--url: give a URL"):
        find_target(home(tmp_path), url=url, port=None, key=None)


def test_a_target_shows_no_key(tmp_path: Path) -> None:
    assert "sk-" not in repr(find_target(home(tmp_path, OWN), url=None, port=None, key=None))


@pytest.mark.parametrize(
    ("status", "body", "line"),
    [
        (400, b'{"detail": "Too small.", "param": "limit", "code": "c"}', "limit: Too small."),
        (401, b'{"error": {"message": "Wrong key."}}', "Wrong key. (the key for http://x)"),
        (502, b"<html>", "http://x: status 502"),
        (404, b'{"title": "Not Found"}', "Not Found"),
        (400, b"[" * 100_000, "http://x: status 400"),
    ],
)
def test_a_refusal_is_one_line_that_names_the_field(status: int, body: bytes, line: str) -> None:
    code = "c" if b"code" in body else None
    assert refusal(GatewayTarget("http://x", "--url", "k"), status, body) == (line, code)
