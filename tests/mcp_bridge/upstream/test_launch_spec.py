"""The operator's list: what is not on it does not start, and what changed is another pin."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mcp_bridge.upstream import launch_spec
from mcp_bridge.upstream.launch_errors import BadLaunch, DigestMismatch
from mcp_bridge.upstream.launch_spec import (
    FileDigest,
    ImageDigest,
    LaunchSpec,
    ProcessLimits,
    TreeDigest,
    check_on_disk,
    filled_environment,
    tree_sha256,
)

IMAGE = "registry.example/server@sha256:" + "a" * 64
SPEC = LaunchSpec(
    name="github",
    command="/usr/bin/docker",
    args=("run", "-i", "--rm", IMAGE),
    environment={"LOG_LEVEL": "info"},
    credential_names=("GITHUB_TOKEN",),
    digests=(ImageDigest(reference=IMAGE),),
    readable=("/srv/repos",),
)
OTHERWISE: dict[str, Any] = {
    "command": "/bin/sh",
    "args": ("-c", "curl evil", IMAGE),
    "environment": {"LOG_LEVEL": "debug"},
    "credential_names": ("GITHUB_TOKEN", "AWS_SECRET"),
    "digests": (),
    "readable": ("/",),
    "network": False,
}
LONG = "x" * (launch_spec.MAX_ARG_BYTES + 1)


@pytest.mark.parametrize("field", sorted(OTHERWISE))
def test_a_spec_that_changed_after_it_was_approved_is_another_one(field: str) -> None:
    """CVE-2025-54136: the name stays, the command behind it does not."""
    changed = msgspec.structs.replace(SPEC, **{field: OTHERWISE[field]})
    assert changed.to_canonical() != SPEC.to_canonical()
    assert msgspec.structs.replace(SPEC).to_canonical() == SPEC.to_canonical()


def test_the_canonical_form_is_json_and_knows_no_order_of_names() -> None:
    names = ("A_TOKEN", "B_TOKEN")
    one = msgspec.structs.replace(SPEC, credential_names=names)
    other = msgspec.structs.replace(SPEC, credential_names=names[::-1])
    assert one.to_canonical() == other.to_canonical()
    assert json.loads(json.dumps(one.to_canonical())) == one.to_canonical()
    looser = msgspec.structs.replace(SPEC, limits=ProcessLimits(cpu_s=1))
    assert looser.to_canonical() == SPEC.to_canonical()
    swapped = msgspec.structs.replace(SPEC, args=SPEC.args[::-1])
    assert swapped.to_canonical() != SPEC.to_canonical()


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("name", {"name": "../x"}),
        ("name", {"name": ""}),
        ("command", {"command": "docker"}),
        ("command", {"command": "/bin/s\0h"}),
        ("args", {"args": ("x",) * 65}),
        ("args[1]", {"args": (IMAGE, LONG)}),
        ("readable", {"readable": ("/x",) * 65}),
        ("readable[0]", {"readable": ("srv",)}),
        ("environment.A=B", {"environment": {"A=B": "x"}}),
        ("environment.A", {"environment": {"A": "\0"}}),
        ("credential_names", {"credential_names": ("A", "A")}),
        ("credential_names.1", {"credential_names": ("1",)}),
        ("credential_names.LOG_LEVEL", {"credential_names": ("LOG_LEVEL",)}),
        ("digests", {"digests": SPEC.digests * 65}),
        ("digests[0]", {"digests": (ImageDigest(reference="server:latest"),)}),
        ("digests[0]", {"args": ()}),
        ("digests[0]", {"digests": (FileDigest(path="x", sha256="a" * 64),)}),
        ("digests[0]", {"digests": (TreeDigest(path="/x", sha256="A" * 64),)}),
        ("limits.cpu_s", {"limits": ProcessLimits(cpu_s=0)}),
    ],
)
def test_a_spec_that_cannot_be_names_its_field(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(BadLaunch) as refused:
        msgspec.structs.replace(SPEC, **changes).check()
    assert refused.value.field == field


@pytest.mark.parametrize(
    "name",
    [
        "LD_PRELOAD",
        "PYTHONSTARTUP",
        "NODE_OPTIONS",
        "npm_config_registry",
        "BASH_ENV",
        "PATH",
        "HOME",
        "GIT_SSH_COMMAND",
        "JAVA_TOOL_OPTIONS",
        "https_proxy",
        "HTTPS_PROXY",
        "SSL_CERT_FILE",
    ],
)
def test_no_tenant_fills_what_steers_a_process(name: str) -> None:
    with pytest.raises(BadLaunch, match="never a tenant's"):
        msgspec.structs.replace(SPEC, credential_names=(name,)).check()


def test_credentials_are_those_that_the_spec_names() -> None:
    filled = filled_environment(SPEC, {"GITHUB_TOKEN": "ghp"})
    assert filled == {"LOG_LEVEL": "info", "GITHUB_TOKEN": "ghp"}
    for credentials, text in (
        ({}, "credentials.GITHUB_TOKEN: is missing"),
        ({"GITHUB_TOKEN": "x", "LD_PRELOAD": "y"}, "credentials.LD_PRELOAD: is no credential"),
        ({"GITHUB_TOKEN": "a\0b"}, "credentials.GITHUB_TOKEN: longer than"),
        ({"GITHUB_TOKEN": "s" * 40_000}, "credentials.GITHUB_TOKEN: longer than"),
    ):
        with pytest.raises(BadLaunch, match=text) as refused:
            filled_environment(SPEC, credentials)
        assert "sss" not in str(refused.value)


def package(root: Path) -> Path:
    (root / "lib").mkdir(parents=True)
    (root / "main.js").write_text("run()")
    (root / "lib" / "a.js").write_text("a")
    (root / "lib" / "again").symlink_to("a.js")
    return root


def test_a_package_that_changed_on_the_disk_does_not_start(tmp_path: Path) -> None:
    root = package(tmp_path / "package")
    digest = TreeDigest(path=str(root), sha256=tree_sha256(root))
    spec = LaunchSpec(name="p", command="/bin/cat", digests=(digest,))
    check_on_disk(spec)
    assert tree_sha256(package(tmp_path / "elsewhere")) == digest.sha256

    def link() -> None:
        (root / "lib" / "again").unlink()
        (root / "lib" / "again").symlink_to("/etc/passwd")

    changes = (
        lambda: (root / "lib" / "a.js").write_text("b"),
        lambda: (root / "lib" / "b.js").write_text(""),
        lambda: (root / "main.js").chmod(0o755),
        link,
        lambda: (root / "main.js").rename(root / "main.cjs"),
        lambda: os.mkfifo(root / "pipe"),
    )
    seen = {digest.sha256}
    for change in changes:
        change()
        with pytest.raises(DigestMismatch, match=f"p: {root} is not what was pinned"):
            check_on_disk(spec)
        seen.add(tree_sha256(root))
    assert len(seen) == len(changes) + 1


def test_what_is_too_large_or_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = package(tmp_path / "package")
    file = FileDigest(path=str(root / "main.js"), sha256="0" * 64)
    tree = TreeDigest(path=str(root), sha256="0" * 64)
    gone = FileDigest(path=str(root / "gone"), sha256="0" * 64)
    monkeypatch.setattr(launch_spec, "MAX_HASHED_BYTES", 3)
    monkeypatch.setattr(launch_spec, "MAX_TREE_FILES", 2)
    for digest, text in ((file, "more than can"), (tree, "more than can"), (gone, "No such file")):
        with pytest.raises(DigestMismatch, match=text):
            check_on_disk(LaunchSpec(name="p", command="/bin/cat", digests=(digest,)))
