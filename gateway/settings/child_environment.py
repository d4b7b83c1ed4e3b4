"""Chooses the environment variables that child processes get: an allow list, for any other may hold
a secret of the operator's.

A worker asks upstreams, so it also gets the variables that the settings name as secrets; an engine
gets none of them, whatever they are called. Postgres, Valkey and stdio servers get constants.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from gateway.settings.load import Settings

ALLOWED = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_\w+|TZ|TZDIR|TMPDIR|XDG_CACHE_HOME|VIRTUAL_ENV"
    r"|PYTHON\w+|LD_LIBRARY_PATH|LD_PRELOAD|MALLOC_\w+|GLIBC_TUNABLES"
    r"|SSL_CERT_FILE|SSL_CERT_DIR|RAYON_\w+|TOKENIZERS_\w+"
)
"""They say where programs, libraries, certificates and temporary files are, and the language."""
ALLOWED_FOR_ENGINES = re.compile(
    r"(?:CUDA|NVIDIA|NCCL|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|OMP|GOMP|KMP|MKL|OPENBLAS|NUMBA"
    r"|ROCM|HIP|HSA)_\w+"
)
"""They say how a device and the libraries of kernels are used."""
ALLOWED_FOR_LAUNCHED = re.compile(r"HF_\w+")
"""They say how an engine on another machine reaches the hub, from which it fetches its model."""
SECRET_FIELD = "_env"
"""A setting whose name ends so names a variable that holds a secret."""


def worker_environment(
    environ: Mapping[str, str], settings: Settings, **extra: str
) -> dict[str, str]:
    secrets = set(secret_variables(settings))
    return {
        name: value for name, value in environ.items() if name in secrets or ALLOWED.fullmatch(name)
    } | extra


def engine_environment(
    environ: Mapping[str, str], settings: Settings, **extra: str
) -> dict[str, str]:
    secrets = set(secret_variables(settings))
    return {
        name: value
        for name, value in environ.items()
        if name not in secrets and (ALLOWED.fullmatch(name) or ALLOWED_FOR_ENGINES.fullmatch(name))
    } | extra


def launched_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an engine on a machine of its own, out of that of whoever starts it
    there."""
    allowed = (ALLOWED, ALLOWED_FOR_ENGINES, ALLOWED_FOR_LAUNCHED)
    return {
        name: value
        for name, value in environ.items()
        if any(each.fullmatch(name) for each in allowed)
    }


def secret_variables(settings: Settings) -> Iterator[str]:
    """Yield the names of the variables that hold secrets, wherever settings name one."""
    yield from named_in(msgspec.to_builtins(settings, enc_hook=str))


def named_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(key, str) and key.endswith(SECRET_FIELD) and isinstance(inner, str):
                yield inner
            else:
                yield from named_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from named_in(inner)
