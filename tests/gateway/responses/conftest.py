"""One worker for the tests of a module."""

from __future__ import annotations

from tests.gateway.openapi.conftest import worker

__all__ = ["worker"]
