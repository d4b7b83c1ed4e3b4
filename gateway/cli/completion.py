"""`tollgate completion`: prints a shell's script, and completes the names that a gateway knows.

A name is asked of the gateway that the command would ask. Where none answers at once nothing is
offered: whoever presses Tab does not want to wait, and a message would destroy the line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import quote, urlsplit

import click
import msgspec
from click.shell_completion import CompletionItem, ShellComplete, get_completion_class

from gateway.cli.shared.in_force import in_force
from gateway.cli.shared.target import GatewayError, GatewayTarget, examples, find_target
from gateway.cli.shared.times import PERIOD_WORDS
from gateway.settings.file import SettingsError
from gateway.settings.load import Settings, load

ANSWER_S = 0.3
"""Seconds in which a gateway has to answer."""
MAX_ANSWER_BYTES = 1_000_000
MAX_NAMES = 100
PERIODS = ("today", "yesterday", "last", "this")
PERIOD_UNITS = {"last": ("24h", "7d", "30d", "week", "month"), "this": ("week", "month", "year")}
Find = Callable[[click.Context, str], list[CompletionItem]]


class NamesList(msgspec.Struct, frozen=True):
    """A list of the API whose members have names. `about`: the field that says what one is."""

    path: str
    name: str
    about: str | None = None


MODELS = NamesList("/v1/admin/models", "id")
REPLICAS = NamesList("/v1/admin/fleet", "id", "state")
ORGS = NamesList("/v1/admin/orgs", "name")
PROJECTS = NamesList("/v1/admin/projects", "name")
PLANS = NamesList("/v1/admin/plans", "name")
KEYS = NamesList("/v1/admin/keys", "id", "name")
USERS = NamesList("/v1/admin/users", "email", "role")
OF_OPTIONS = {
    "--org": ORGS,
    "--project": PROJECTS,
    "--plan": PLANS,
    "--model": MODELS,
    "--allow": MODELS,
    "--deny": MODELS,
    "--key-id": KEYS,
    "--email": USERS,
}
OF_ARGUMENTS = {
    "tollgate keys rotate": KEYS,
    "tollgate keys revoke": KEYS,
    "tollgate orgs set-plan": ORGS,
    "tollgate orgs set-origins": ORGS,
    "tollgate projects set-plan": PROJECTS,
    "tollgate projects set-models": PROJECTS,
    "tollgate models set": MODELS,
    "tollgate models remove": MODELS,
    "tollgate models pin": MODELS,
    "tollgate models unpin": MODELS,
    "tollgate models pins": MODELS,
    "tollgate models evaluate": MODELS,
    "tollgate models evaluations": MODELS,
    "tollgate models rollout start": MODELS,
    "tollgate models rollout status": MODELS,
    "tollgate models rollout pause": MODELS,
    "tollgate models rollout resume": MODELS,
    "tollgate models rollout abort": MODELS,
    "tollgate models rollout complete": MODELS,
    "tollgate models versions list": MODELS,
    "tollgate models versions add": MODELS,
    "tollgate models versions remove": MODELS,
    "tollgate fleet drain": REPLICAS,
    "tollgate fleet undrain": REPLICAS,
    "tollgate fleet token revoke": NamesList("/v1/admin/join_tokens", "id", "model"),
    "tollgate credits add": ORGS,
    "tollgate budgets remove": NamesList("/v1/admin/spend-caps", "id", "amount_usd"),
    "tollgate invoices get": NamesList("/v1/admin/invoices", "number"),
}
"""Lists by the command whose first argument is a name of them."""
OTHER_NAMES = ("tollgate up", "tollgate gateway", "tollgate engine", "tollgate users create")
"""Commands whose options of these names mean what no gateway knows: a folder, a new person."""
SERVER_COMMANDS = tuple(
    f"tollgate mcp {each}" for each in ("approve", "call", "diff", "doctor", "remove")
)


@click.command(
    epilog=examples(
        'eval "$(tollgate completion bash)"',
        "tollgate completion fish > ~/.config/fish/completions/tollgate.fish",
    )
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script for SHELL that completes commands, options and names.

    Let the shell run it (`eval`), or keep it where the shell looks for completions: bash in
    ~/.local/share/bash-completion/completions/tollgate, zsh as _tollgate in a folder of $fpath,
    fish in ~/.config/fish/completions/tollgate.fish. Names of models, keys, organizations and
    others are those of the running gateway, if it answers in 0.3 s.
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click knows the shells of the choice"
    made = kind(context.find_root().command, {}, "tollgate", "_TOLLGATE_COMPLETE")
    click.echo(ShellComplete.source(made))  # bash's own would start a bash, to ask its version


def complete_names(command: click.Command, name: str) -> None:
    """Let the parameters of a command, and of those below it, complete what they name."""
    if isinstance(command, click.Group):
        for each, below in command.commands.items():
            complete_names(below, f"{name} {each}")
        return
    if name in OTHER_NAMES:
        return
    is_first = True
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            found = next((OF_OPTIONS[each] for each in parameter.opts if each in OF_OPTIONS), None)
            if found is not None:
                set_completion(parameter, names_of(found))
        elif parameter.name == "span":
            set_completion(parameter, period_words)
        elif is_first:
            is_first = False
            if name in OF_ARGUMENTS:
                set_completion(parameter, names_of(OF_ARGUMENTS[name]))
            elif name in SERVER_COMMANDS:
                set_completion(parameter, server_names)


def set_completion(parameter: click.Parameter, find: Find) -> None:
    parameter.shell_complete = find  # type: ignore[method-assign, assignment]


def names_of(wanted: NamesList) -> Find:
    def find(context: click.Context, begun: str) -> list[CompletionItem]:
        return [each for each in read_names(context, wanted) if each.value.startswith(begun)]

    return find


def read_names(context: click.Context, wanted: NamesList) -> list[CompletionItem]:
    """Return what the gateway knows; nothing if it cannot be asked, or does not answer at once."""
    given = context.params
    try:
        settings = settings_of(context)
        target = find_target(settings, **{each: given.get(each) for each in ("url", "port", "key")})
        rows = ask(target, wanted.path)
    except (GatewayError, SettingsError, OSError, HTTPException, ValueError):
        return []  # there is no line to say it on
    return [
        CompletionItem(str(row[wanted.name]), help=about(row, wanted))
        for row in rows
        if isinstance(row, dict) and row.get(wanted.name)
    ]


def settings_of(context: click.Context) -> Settings:
    """Raises: SettingsError."""
    given = context.params
    return load({each: given.get(each) for each in ("home", "config")})


def about(row: dict[str, Any], wanted: NamesList) -> str | None:
    said = None if wanted.about is None else row.get(wanted.about)
    return None if said is None else str(said)


def ask(target: GatewayTarget, path: str) -> list[Any]:
    """Raises: OSError, HTTPException, ValueError."""
    if target.key is None:
        return []
    ends_at = time.monotonic() + ANSWER_S
    parts = urlsplit(target.base)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=ANSWER_S)
    try:
        connection.connect()
        connection.sock.settimeout(max(ends_at - time.monotonic(), 0.001))
        headers = {"authorization": f"Bearer {target.key}"}
        connection.request("GET", f"{quote(path)}?limit={MAX_NAMES}", headers=headers)
        answer = connection.getresponse()
        content = answer.read(MAX_ANSWER_BYTES)
        if answer.status != 200:
            return []
        data = msgspec.json.decode(content, type=dict[str, Any]).get("data")
    finally:
        connection.close()
    return data if isinstance(data, list) else []


def server_names(context: click.Context, begun: str) -> list[CompletionItem]:
    try:
        servers = in_force(settings_of(context)).mcp.servers
    except SettingsError:
        return []  # there is no line to say it on
    return [CompletionItem(each.name) for each in servers if each.name.startswith(begun)]


def period_words(context: click.Context, begun: str) -> list[CompletionItem]:
    """Complete a period of one or two words."""
    said: Sequence[str] = context.meta.get(PERIOD_WORDS, ())
    words = PERIOD_UNITS.get(said[-1], ()) if said else PERIODS
    return [CompletionItem(each) for each in words if each.startswith(begun)]
