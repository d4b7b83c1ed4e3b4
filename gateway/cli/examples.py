"""Examples that `--help` of the older commands ends with; a new command has its own as its epilog.

Each can be typed as it stands: tests parse all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import click

from gateway.cli.shared.target import examples

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "tollgate up": (
        "tollgate up",
        "tollgate up --model Qwen/Qwen2.5-0.5B-Instruct",
        "tollgate up --workers 4 --host 0.0.0.0 --port 8080",
    ),
    "tollgate gateway": ("tollgate gateway --host 0.0.0.0",),
    "tollgate engine": ("tollgate engine --model models/penny --listen tcp:127.0.0.1:9000",),
    "tollgate migrate": ("tollgate migrate",),
    "tollgate reconcile": ("tollgate reconcile",),
    "tollgate audit verify": ("tollgate audit verify", "tollgate audit verify --org acme --json"),
    "tollgate vault rewrap": ("tollgate vault rewrap",),
    "tollgate secret reseal": ("tollgate secret reseal",),
    "tollgate keys create": (
        "tollgate keys create --name ci",
        "tollgate keys create --name shop --org acme --project web --requests-per-minute 60",
        "tollgate keys create --name tools --scope inference --scope mcp:call",
    ),
    "tollgate keys list": ("tollgate keys list", "tollgate keys list --json"),
    "tollgate keys rotate": ("tollgate keys rotate key_0192 --grace-s 3600",),
    "tollgate keys revoke": ("tollgate keys revoke key_0192", "tollgate keys revoke 7f3a9c"),
    "tollgate orgs create": ("tollgate orgs create --name acme --plan team",),
    "tollgate orgs list": ("tollgate orgs list",),
    "tollgate orgs set-plan": (
        "tollgate orgs set-plan acme --plan team",
        "tollgate orgs set-plan acme --no-plan",
    ),
    "tollgate orgs set-origins": (
        "tollgate orgs set-origins acme --origin https://app.example.com",
    ),
    "tollgate projects create": ("tollgate projects create --org acme --name web",),
    "tollgate projects list": ("tollgate projects list --org acme",),
    "tollgate projects set-plan": ("tollgate projects set-plan web --org acme --plan team",),
    "tollgate projects set-models": ("tollgate projects set-models web --org acme --allow penny",),
    "tollgate projects set-content": ("tollgate projects set-content on web --org acme",),
    "tollgate users create": (
        "tollgate users create --org acme --email ann@acme.example --role admin",
        "tollgate users create --email me@example.com < password.txt",
    ),
    "tollgate users passwd": ("tollgate users passwd --org acme --email ann@acme.example",),
    "tollgate users link": (
        "tollgate users link",
        "tollgate users link --org acme --email ann@acme.example",
    ),
    "tollgate users list": ("tollgate users list --org acme",),
    "tollgate spool list": ("tollgate spool list", "tollgate spool list --all --json"),
    "tollgate spool show": ("tollgate spool show 0-1a2b3c4d.12",),
    "tollgate spool accept": ("tollgate spool accept 0-1a2b3c4d.12",),
    "tollgate spool discard": ("tollgate spool discard 0-1a2b3c4d.12",),
    "tollgate backup key": ("tollgate backup key /media/safe/backup.key",),
    "tollgate backup create": ("tollgate backup create /backups --to age1...",),
    "tollgate backup verify": ("tollgate backup verify /backups --identity backup.key",),
    "tollgate backup restore": (
        "tollgate backup restore /backups --identity backup.key --home /srv/tollgate",
    ),
    "tollgate backup prune": ("tollgate backup prune /backups --keep 30",),
    "tollgate billing rerate": (
        "tollgate billing rerate --org acme --from 2026-11-01 --to 2026-12-01",
        "tollgate billing rerate --org acme --from 2026-11-01 --to 2026-12-01 --apply 3f2a",
    ),
    "tollgate billing finalize": ("tollgate billing finalize --org acme inv_0192",),
    "tollgate prices import": (
        "tollgate prices import --from litellm model_prices.json",
        "tollgate prices import --from genai-prices --model gpt=gpt-4o data.json",
    ),
    "tollgate prices diff": ("tollgate prices diff draft.toml",),
    "tollgate prices apply": ("tollgate prices apply --digest 3f2a draft.toml",),
    "tollgate prices check": ("tollgate prices check --litellm model_prices.json",),
    "tollgate mcp add": (
        "tollgate mcp add docs https://mcp.example.com/mcp",
        "tollgate mcp add pets --openapi openapi.json",
        "tollgate mcp add files -- npx -y server-files@1.0.0 /srv/files",
    ),
    "tollgate mcp remove": ("tollgate mcp remove docs",),
    "tollgate mcp list": ("tollgate mcp list", "tollgate mcp list --org acme --json"),
    "tollgate mcp diff": ("tollgate mcp diff docs",),
    "tollgate mcp approve": (
        "tollgate mcp approve docs --all",
        "tollgate mcp approve docs --tool search",
    ),
    "tollgate mcp rules": ("tollgate mcp rules", "tollgate mcp rules rules.toml --org acme"),
    "tollgate mcp calls": ("tollgate mcp calls", "tollgate mcp calls --allow mcpapp_0192"),
    "tollgate mcp taints": ("tollgate mcp taints",),
    "tollgate mcp doctor": ("tollgate mcp doctor",),
    "tollgate mcp call": ("""tollgate mcp call docs search '{"query": "deadline"}'""",),
}


def add_examples(command: click.Command, name: str) -> None:
    """Put the examples behind the help of `command` and of those below it."""
    lines = EXAMPLES.get(name)
    if lines is not None:
        command.epilog = "\n\n".join(filter(None, (command.epilog, examples(*lines))))
    if isinstance(command, click.Group):
        for word, below in command.commands.items():
            add_examples(below, f"{name} {word}")
