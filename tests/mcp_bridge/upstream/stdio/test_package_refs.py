"""A launcher's arguments say what it fetches, and whether it could be another thing tomorrow."""

from __future__ import annotations

import pytest

from mcp_bridge.upstream.stdio.package_refs import images_in, package_refs, unpinned

SHA, COMMIT = "a" * 64, "b" * 40
IMAGE = f"ghcr.io/acme/server:1.2@sha256:{SHA}"


@pytest.mark.parametrize(
    ("command", "args", "names", "exact"),
    [
        ("npx", "-y @scope/server@1.2.3 /srv", ["@scope/server@1.2.3"], True),
        ("npx", "-y @scope/server", ["@scope/server"], False),
        ("npx", "server@latest", ["server@latest"], False),
        ("npx", "server@^1.2.3", ["server@^1.2.3"], False),
        ("npx", "server@1", ["server@1"], False),
        ("npx", "--package=a@1.0.0 -p b@2.0.0-rc.1 -- run-it", ["a@1.0.0", "b@2.0.0-rc.1"], True),
        ("npx", "-p a@1.0.0 -p b run-it", ["a@1.0.0", "b"], False),
        ("npx", "--registry https://r.example server@1.0.0", ["server@1.0.0"], True),
        ("npx", f"git+https://h.example/x#{COMMIT}", [f"git+https://h.example/x#{COMMIT}"], True),
        ("npx", "github:acme/server", ["github:acme/server"], False),
        ("npx", "", [None], False),
        ("npm", "exec --yes -- server@1.0.0", ["server@1.0.0"], True),
        ("npm", "x server", ["server"], False),
        ("npm", "run serve", [], True),
        ("pnpm", "dlx server@1.0.0", ["server@1.0.0"], True),
        ("uvx", "mcp-server-time", ["mcp-server-time"], False),
        ("uvx", "mcp-server-time==2025.4", ["mcp-server-time==2025.4"], True),
        ("uvx", "mcp-server-time==2025.*", ["mcp-server-time==2025.*"], False),
        ("uvx", "mcp-server-time>=1", ["mcp-server-time>=1"], False),
        ("uvx", "mcp-server-time@1.0", ["mcp-server-time@1.0"], True),
        ("uvx", "mcp-server-time@latest", ["mcp-server-time@latest"], False),
        ("uvx", "-p 3.12 --from mcp[cli]==1.0 run", ["mcp[cli]==1.0"], True),
        ("uvx", "--with x --from a==1 run", ["x", "a==1"], False),
        ("uvx", "--with x==1 a==1", ["x==1", "a==1"], True),
        ("uvx", f"--from a@git+https://h/x@{COMMIT} a", [f"a@git+https://h/x@{COMMIT}"], True),
        ("uvx", "--from git+https://h/x@main a", ["git+https://h/x@main"], False),
        ("uv", "tool run a==1", ["a==1"], True),
        ("uv", "--directory /srv run server", [], True),
        ("uv", "run --with a --with=b==1 server.py", ["a", "b==1"], False),
        ("uv", "run -- server --with a", [], True),
        ("pipx", "run --spec a==1 a", ["a==1"], True),
        ("docker", f"run -i --rm -e TOKEN {IMAGE} serve", [IMAGE], True),
        ("docker", "run -i --rm -e TOKEN acme/server:1.2", ["acme/server:1.2"], False),
        ("docker", f"--context far run -it --network none {IMAGE}", [IMAGE], True),
        ("docker", f"run -eA=b --mount type=bind,src=/a,dst=/b {IMAGE}", [IMAGE], True),
        ("docker", f"container run --name {IMAGE} latest", ["latest"], False),
        ("podman", f"run -i --replace --name x -- {IMAGE}", [IMAGE], True),
        ("docker", "compose run server", [None], False),
        ("docker", "run --rm", [None], False),
        ("python3", "-m server", [], True),
        ("mcp-files", f"run {IMAGE}", [], True),
    ],
)
def test_what_is_fetched_is_told_from_what_stands_around_it(
    command: str, args: str, names: list[str | None], exact: bool
) -> None:
    found = package_refs(f"/usr/bin/{command}", args.split())
    assert [one.name for one in found] == names
    assert all(one.is_exact for one in found) == exact
    assert len(unpinned(command, args.split())) == sum(not one.is_exact for one in found)


def test_images_are_those_that_are_named_by_digest() -> None:
    assert images_in("/usr/bin/docker", ("run", "-i", IMAGE)) == (IMAGE,)
    assert images_in("/usr/bin/docker", ("run", "-i", "acme:1", IMAGE)) == ()


def test_who_has_to_pin_is_told_how() -> None:
    (said,) = unpinned("npx", ("-y", "server"))
    assert said == "server: name its exact version, as in NAME@1.2.3"
    (said,) = unpinned("docker", ("run", "acme:1"))
    assert said.startswith("acme:1: name it by its digest")
