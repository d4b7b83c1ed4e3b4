"""A Redis that is waited for, in tests of anything but how long it is waited for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.conftest import be_patient_with_stores


@pytest.fixture(scope="module", autouse=True)
def patient_with_stores() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        be_patient_with_stores(patch)
        yield
