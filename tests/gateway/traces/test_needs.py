"""Traces want their extra and the secret that they name before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.processes.models import model_folders
from gateway.processes.models.model_folders import check_models
from gateway.settings.file import SettingsError
from gateway.settings.load import load

UPSTREAM = '[[model]]\nname = "m"\nupstream = "http://127.0.0.1:1/v1"\n'
TRACES = '[traces]\nendpoint = "http://127.0.0.1:4317"\nprotocol = "grpc"\n'


def test_traces_want_the_secret_that_they_name_and_their_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "tollgate.toml"
    config.write_text(UPSTREAM + TRACES + 'headers_env = "COLLECTOR_HEADERS"\n')
    settings = load({"home": tmp_path, "config": config}, {})
    with pytest.raises(SettingsError, match=r"traces\.headers_env"):
        check_models(settings, weights=False)
    monkeypatch.setenv("COLLECTOR_HEADERS", "authorization=Bearer x")
    check_models(settings, weights=False)
    monkeypatch.setattr(model_folders, "is_there", lambda module: not module.endswith(".grpc"))
    with pytest.raises(SettingsError, match="otel-grpc"):
        check_models(settings, weights=False)
