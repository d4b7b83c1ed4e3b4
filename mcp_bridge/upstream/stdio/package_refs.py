"""Finds the packages and images that a launcher fetches, and whether they are pinned exactly. Pure.

The digest of `npx`, `uvx`, `docker` and the like says nothing about what they run: a package is
pinned by its exact version or commit, an image by its digest. The options with values of the
launchers are listed here; a reference that cannot be determined counts as not exact.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

NPM_EXACT = re.compile(r"(?:@[^@/\s]+/)?[^@/\s]+@v?\d+\.\d+\.\d+(?:-[0-9A-Za-z.-]+)?(?:\+[\w.-]+)?")
PYPI_EXACT = re.compile(r"[A-Za-z0-9._-]+(?:\[[\w, .-]*\])?(?:==|@)\d+(?:[.!+][\w.+!-]*)?")
BY_COMMIT = re.compile(r"(?:[\w.\[\]-]+ ?@ ?)?(?:git\+)?[a-z+]+:\S+[@#](?:commit=)?[0-9a-f]{40}")
BY_HASH = re.compile(r"(?:[\w.\[\]-]+ ?@ ?)?https?://\S+#(?:\S*&)?sha256=[0-9a-f]{64}")
IMAGE_EXACT = re.compile(r"[^@\s]{1,400}@sha256:[0-9a-f]{64}")

Kind = Literal["npm", "pypi", "image"]
HOW: dict[Kind, str] = {
    "npm": "name its exact version, as in NAME@1.2.3",
    "pypi": "name its exact version, as in NAME==1.2.3",
    "image": "name it by its digest, NAME@sha256:... (`docker image inspect NAME` tells it)",
}


class PackageLauncher(msgspec.Struct, frozen=True, kw_only=True):
    """A command that fetches packages.

    `verbs`: subcommands, one of which comes before the package. `named_by`: options whose value is
    a package. `valued`: other options with a value.
    """

    kind: Kind
    verbs: tuple[tuple[str, ...], ...] = ((),)
    named_by: frozenset[str] = frozenset()
    beside: frozenset[str] = frozenset()
    """The options in `named_by` that add to the positional package instead of replacing it."""
    valued: frozenset[str] = frozenset()
    beside_verbs: tuple[tuple[str, ...], ...] = ()
    """Subcommands that run a local program and fetch only the packages of `beside`."""


class PackageRef(msgspec.Struct, frozen=True):
    """A package or image that is fetched. `name`: as in the arguments; None: not determined."""

    kind: Kind
    name: str | None

    @property
    def is_exact(self) -> bool:
        if self.name is None:
            return False
        if self.kind == "image":
            return IMAGE_EXACT.fullmatch(self.name) is not None
        exact = NPM_EXACT if self.kind == "npm" else PYPI_EXACT
        forms = (exact, BY_COMMIT, BY_HASH)
        return any(form.fullmatch(self.name) for form in forms)

    @property
    def how(self) -> str:
        """Return, for people, how to pin this reference exactly."""
        what = "an image" if self.kind == "image" else "a package"
        return f"{what if self.name is None else self.name}: {HOW[self.kind]}"


_NPM = frozenset(("-p", "--package"))
_NPM_VALUED = frozenset(("-c", "--call", "-w", "--workspace", "--registry", "--cache", "--prefix"))
_UV_BESIDE = frozenset(("--with", "--with-editable", "--with-requirements", "-w"))
_UV_VALUED = frozenset(
    "-p --python --index-url -i --index --default-index --extra-index-url --find-links -f"
    " --directory --project --cache-dir --config-file --env-file --index-strategy"
    " --keyring-provider --resolution --prerelease --exclude-newer --link-mode -C"
    " --config-setting --color -c --constraints --overrides -b --build-constraints"
    " --upgrade-package -P --reinstall-package --refresh-package".split()
)
LAUNCHERS: dict[str, PackageLauncher] = {
    "npx": PackageLauncher(kind="npm", named_by=_NPM, valued=_NPM_VALUED),
    "npm": PackageLauncher(
        kind="npm", verbs=(("exec",), ("x",)), named_by=_NPM, valued=_NPM_VALUED
    ),
    "pnpx": PackageLauncher(kind="npm", named_by=_NPM, valued=_NPM_VALUED),
    "pnpm": PackageLauncher(kind="npm", verbs=(("dlx",),), named_by=_NPM, valued=_NPM_VALUED),
    "yarn": PackageLauncher(kind="npm", verbs=(("dlx",),), named_by=_NPM, valued=_NPM_VALUED),
    "bunx": PackageLauncher(kind="npm", named_by=_NPM),
    "uvx": PackageLauncher(
        kind="pypi",
        named_by=frozenset(("--from", *_UV_BESIDE)),
        beside=_UV_BESIDE,
        valued=_UV_VALUED,
    ),
    "uv": PackageLauncher(
        kind="pypi",
        verbs=(("tool", "run"),),
        beside_verbs=(("run",),),
        named_by=frozenset(("--from", *_UV_BESIDE)),
        beside=_UV_BESIDE,
        valued=_UV_VALUED,
    ),
    "pipx": PackageLauncher(
        kind="pypi",
        verbs=(("run",),),
        named_by=frozenset(("--spec", "--with")),
        beside=frozenset(("--with",)),
        valued=frozenset(("--python", "--pip-args", "--index-url", "-i")),
    ),
}
CONTAINERS = frozenset(("docker", "podman", "nerdctl"))
CONTAINER_VERBS = (("run",), ("create",), ("container", "run"), ("container", "create"))
CONTAINER_VALUED = frozenset(
    "-H --host -c --context --config -l --log-level --connection --url --identity --root --runroot"
    " --storage-driver --namespace -n".split()
)
"""Options with a value before the subcommand."""
RUN_FLAGS = frozenset(
    "--detach --init --interactive --no-healthcheck --oom-kill-disable --privileged --publish-all"
    " --quiet --read-only --rm --sig-proxy --tty --replace --rmi --tls-verify --env-host"
    " --http-proxy --no-hosts --rootfs --help --disable-content-trust --use-api-socket --passwd"
    " --read-only-tmpfs".split()
)
"""Options without a value after the subcommand; all others have one."""
SHORT_RUN_FLAGS = frozenset("ditPq")


def package_refs(command: str, args: Sequence[str]) -> tuple[PackageRef, ...]:
    """Return everything that a launcher fetches; nothing for other commands."""
    name = command.rpartition("/")[2]
    if name in CONTAINERS:
        return _images(args)
    launcher = LAUNCHERS.get(name)
    if launcher is None:
        return ()
    rest = _behind(args, launcher.verbs, launcher.valued)
    if rest is not None:
        return tuple(_packages(launcher, rest))
    rest = _behind(args, launcher.beside_verbs, launcher.valued)
    return () if rest is None else tuple(_packages(launcher, rest))[:-1]


def unpinned(command: str, args: Sequence[str]) -> tuple[str, ...]:
    """Return, for people, the references that are not exact, each with how to pin it."""
    return tuple(one.how for one in package_refs(command, args) if not one.is_exact)


def images_in(command: str, args: Sequence[str]) -> tuple[str, ...]:
    """Return the images that are pinned by digest."""
    found = (one for one in package_refs(command, args) if one.kind == "image" and one.is_exact)
    return tuple(one.name for one in found if one.name is not None)


def _behind(
    args: Sequence[str], verbs: tuple[tuple[str, ...], ...], valued: frozenset[str]
) -> Sequence[str] | None:
    """Return the arguments after one of the subcommands; None: it is another subcommand."""
    for words in verbs:
        at, left = 0, list(words)
        while left and at < len(args):
            if args[at].startswith("-"):
                at += 2 if args[at] in valued else 1
            elif args[at] == left[0]:
                left.pop(0)
                at += 1
            else:
                break
        if not left:
            return args[at:]
    return None


def _packages(launcher: PackageLauncher, args: Sequence[str]) -> Iterator[PackageRef]:
    in_its_place, at = False, 0
    while at < len(args):
        option, equals, value = args[at].partition("=")
        if args[at] == "--":
            at += 1
            break
        if not option.startswith("-"):
            break
        takes_next = not equals and option in (launcher.named_by | launcher.valued)
        if option in launcher.named_by:
            given = value if equals else next(iter(args[at + 1 : at + 2]), None)
            in_its_place = in_its_place or option not in launcher.beside
            yield PackageRef(launcher.kind, given)
        at += 2 if takes_next else 1
    if not in_its_place:
        yield PackageRef(launcher.kind, args[at] if at < len(args) else None)


def _images(args: Sequence[str]) -> tuple[PackageRef, ...]:
    rest = _behind(args, CONTAINER_VERBS, CONTAINER_VALUED)
    if rest is None:
        # A subcommand such as `compose` may run images that a file names.
        return (PackageRef("image", None),)
    at = 0
    while at < len(rest) and rest[at].startswith("-"):
        option = rest[at]
        if option == "--":
            at += 1
            break
        is_flag = "=" in option or option in RUN_FLAGS
        if not option.startswith("--"):
            # `-it`, or an option with its value attached: `-eA=b`.
            is_flag = set(option[1:]) <= SHORT_RUN_FLAGS or len(option) > 2
        at += 1 if is_flag else 2
    return (PackageRef("image", rest[at] if at < len(rest) else None),)
