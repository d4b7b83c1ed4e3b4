"""Checks that children get what they need of the environment, and no secret that is not theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.settings.child_environment import (
    engine_environment,
    secret_variables,
    worker_environment,
)
from gateway.settings.load import Settings, load

CONFIG = """
[[model]]
name = "one"
upstream = "http://127.0.0.1:1/v1"
api_key_env = "ONE_KEY"
[[model]]
name = "two"
  [[model.replica]]
  upstream = "http://127.0.0.1:1/v1"
  api_key_env = "CUDA_LIKE_KEY"
  [[model.replica]]
  upstream = "http://127.0.0.1:2/v1"
[file_store]
endpoint = "http://127.0.0.1:3"
bucket = "files"
region = "here"
access_key_env = "FILES_ACCESS"
secret_key_env = "FILES_SECRET"
"""
SECRETS = {"ONE_KEY", "CUDA_LIKE_KEY", "FILES_ACCESS", "FILES_SECRET"}
HARMLESS = {
    "PATH": "/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "LC_ALL": "C",
    "TZ": "UTC",
    "PYTHONPATH": "/x",
    "SSL_CERT_FILE": "/y",
    "LD_LIBRARY_PATH": "/z",
}
OF_ENGINES = {
    "CUDA_VISIBLE_DEVICES": "0",
    "NVIDIA_VISIBLE_DEVICES": "all",
    "TRITON_INTERPRET": "1",
    "OMP_NUM_THREADS": "2",
    "TORCH_LOGS": "x",
    "PYTORCH_CUDA_ALLOC_CONF": "x",
}
FOREIGN = {
    "OPENAI_API_KEY": "sk-1",
    "AWS_SECRET_ACCESS_KEY": "s",
    "HF_TOKEN": "hf",
    "DATABASE_URL": "postgres://u:p@h/d",
    "TOLLGATE_DATABASE_URL": "postgres://u:p@h/d",
    "HTTPS_PROXY": "http://u:p@h",
    "GITHUB_TOKEN": "g",
    "CUDA": "no value of CUDA's own",
    "PATHS": "no path",
}


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    file: Path = tmp_path_factory.mktemp("settings") / "t.toml"
    file.write_text(CONFIG)
    return load({"config": file}, {})


def test_the_settings_tell_which_variables_hold_secrets(configured: Settings) -> None:
    assert set(secret_variables(configured)) == SECRETS


def test_a_worker_gets_the_secrets_that_settings_name_and_no_others(configured: Settings) -> None:
    named = dict.fromkeys(SECRETS, "s")
    given = worker_environment(HARMLESS | OF_ENGINES | FOREIGN | named, configured, MORE="1")
    assert given == HARMLESS | named | {"MORE": "1"}


def test_an_engine_gets_no_secret_whatever_it_is_called(configured: Settings) -> None:
    named = dict.fromkeys(SECRETS, "s")
    given = engine_environment(HARMLESS | OF_ENGINES | FOREIGN | named, configured, MORE="1")
    assert given == HARMLESS | OF_ENGINES | {"MORE": "1"}
