"""An upstream's key, in the environment or in a file."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from gateway.settings.file import SettingsError
from gateway.settings.load import load, read_api_key, read_secret
from gateway.settings.models import ReplicaConfig

NO_FILE = Path("no-secret.json")


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (b"sk-1\n", "sk-1"),
        (b"  sk-1", "sk-1"),
        (b"", None),
        (b" \n", None),
        (b"sk-1\nsk-2\n", None),
        (b"sk-\xff", None),
        (b"k" * 20_000, None),
    ],
)
def test_a_file_holds_one_key(tmp_path: Path, content: bytes, key: str | None) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    replica = ReplicaConfig(upstream="http://h/v1", upstream_model="m", api_key_file=path)
    if key is None:
        with pytest.raises(SettingsError, match="api_key_file: .*: must hold one line"):
            read_api_key(replica, NO_FILE)
    else:
        assert read_api_key(replica, NO_FILE) == key
    assert read_api_key(msgspec.structs.replace(replica, api_key_file=None), NO_FILE) is None


def test_a_key_comes_from_a_file_alone(tmp_path: Path) -> None:
    """A pipe would never end."""
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (("pipe", "not a file"), ("none", "No such file"), ("", "not a file")):
        path = tmp_path / name
        replica = ReplicaConfig(upstream="http://h/v1", upstream_model="m", api_key_file=path)
        with pytest.raises(SettingsError, match=reason):
            read_api_key(replica, NO_FILE)


def test_an_upstream_key_stays_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIG_KEY", "hunter2")
    path = tmp_path / "tollgate.toml"
    path.write_text('[[model]]\nname = "far"\nupstream = "http://h/v1"\napi_key_env = "BIG_KEY"\n')
    assert "hunter2" not in repr(load({"config": path}, {}))
    assert read_secret("BIG_KEY") == "hunter2"
    monkeypatch.delenv("BIG_KEY")
    with pytest.raises(SettingsError, match="variable BIG_KEY is not set"):
        read_secret("BIG_KEY")
