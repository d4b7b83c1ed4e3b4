"""The scale of a StatefulSet over HTTPS: read, changed, refused, by credentials that rotate."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.fleet.planner.scale_api import MAX_TRIES, ScaleError
from gateway.settings.kubernetes import KubernetesConfig
from tests.gateway.fleet.planner.kubernetes_api import KubernetesApi, kubernetes_api


@pytest_asyncio.fixture
async def api(tmp_path: Path) -> AsyncIterator[KubernetesApi]:
    async with kubernetes_api(tmp_path) as made:
        yield made


async def test_a_pool_grows_and_shrinks(api: KubernetesApi) -> None:
    client = api.client()
    assert await client.replicas() == 1
    await client.change(1, 4)
    await client.change(4, 2)
    assert api.patches == [{"replicas": 4}, {"replicas": 2}] and await client.replicas() == 2
    api.replicas = 0
    assert await client.replicas() == 0
    elsewhere = api.client(KubernetesConfig(stateful_set="penny", namespace="other"))
    with pytest.raises(ScaleError, match="404: .*namespaces/other/"):
        await elsewhere.replicas()


@pytest.mark.parametrize(
    ("status", "message"), [(401, "what is"), (403, "is forbidden"), (404, "what"), (503, "what")]
)
async def test_a_refusal_is_told_as_it_came(api: KubernetesApi, status: int, message: str) -> None:
    api.status = status
    with pytest.raises(ScaleError, match=f"answers {status}: .*{message}") as told:
        await api.client().change(1, 2)
    assert api.token not in str(told.value) and not api.patches


async def test_a_change_that_meets_others_is_tried_again_and_not_for_ever(
    api: KubernetesApi,
) -> None:
    api.conflicts = MAX_TRIES - 1
    await api.client().change(1, 2)
    assert api.patches == [{"replicas": 2}]
    api.conflicts = MAX_TRIES
    with pytest.raises(ScaleError, match="409: Operation cannot be fulfilled"):
        await api.client().change(2, 3)
    assert api.conflicts == 0 and api.replicas == 2


async def test_what_somebody_else_decided_stays(api: KubernetesApi) -> None:
    api.others_replicas = 5
    with pytest.raises(ScaleError, match="has 5 replicas by now, not 1"):
        await api.client().change(1, 2)
    assert api.replicas == 5


async def test_an_api_that_says_nothing_is_waited_for_so_long(api: KubernetesApi) -> None:
    api.hangs = True
    with pytest.raises(ScaleError, match="does not answer within 0.2 s"):
        await api.client(timeout_s=0.2).replicas()


async def test_a_token_and_certificates_that_rotate_are_read_again(api: KubernetesApi) -> None:
    client = api.client()
    await client.replicas()
    api.token = "second"
    with pytest.raises(ScaleError, match="401: Unauthorized"):
        await client.replicas()
    (api.folder / "token").write_text("second")
    assert await client.replicas() == 1
    await api.end()
    stale = (api.folder / "ca.crt").read_bytes()
    await api.begin()
    fresh = (api.folder / "ca.crt").read_bytes()
    client = api.client()
    (api.folder / "ca.crt").write_bytes(stale)
    with pytest.raises(ScaleError, match="is not reached: .*CERTIFICATE_VERIFY_FAILED"):
        await client.replicas()
    (api.folder / "ca.crt").write_bytes(fresh)
    assert await client.replicas() == 1


async def test_what_is_no_answer_or_no_credential_is_named(api: KubernetesApi) -> None:
    client = api.client()
    for raw, told in (
        (b"no", "is no Scale"),
        (b"{}", "is no Scale"),
        (b" " * (1 << 20) + b"{}", "answers more than 1048576 bytes"),
    ):
        api.raw = raw
        with pytest.raises(ScaleError, match=told):
            await client.replicas()
    api.raw = None
    (api.folder / "ca.crt").write_text("no certificate")
    with pytest.raises(ScaleError, match="ca.crt: "):
        await client.replicas()
    (api.folder / "token").unlink()
    with pytest.raises(ScaleError, match="no service account's credentials here: No such file"):
        await client.replicas()
    await api.end()
    await api.begin()
    await api.end()
    with pytest.raises(ScaleError, match="is not reached: "):
        await api.client().replicas()
