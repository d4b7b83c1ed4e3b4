"""Runs all checks of an installation, one after the other: `tollgate doctor`.

Starts nothing and changes nothing: an installation may be looked at while it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from gateway.home import Home
from gateway.processes.checks import machine, stores
from gateway.processes.checks.diagnosis import Diagnosis
from gateway.processes.models.model_folders import check_models
from gateway.settings.file import MailConfig, SettingsError
from gateway.settings.load import Settings, load_report, read_api_key, read_secret

UPSTREAM_TIMEOUT_S = 10.0
MAIL_TIMEOUT_S = 5.0


async def diagnose(
    flags: dict[str, str | int | Path | None], *, ask_upstreams: bool
) -> AsyncIterator[Diagnosis]:
    """Run all checks. Without settings that can be read there is nothing else to look at.

    ask_upstreams: send each upstream one request for its list of models.
    """
    try:
        report = load_report(flags)
    except SettingsError as error:
        yield Diagnosis(
            "settings", "fails", str(error), "correct it; `tollgate config check` looks again"
        )
        return
    settings = report.settings
    where = "defaults, no file" if report.path is None else str(report.path)
    given = ", ".join(sorted(set(report.sources.values())))
    yield Diagnosis("settings", "ok", where + (f"; {given}" if given else ""))
    for check in (machine.check_home, machine.check_disk, machine.check_memory):
        yield check(settings)
    yield await machine.check_port(settings)
    runs = stores.is_in_use(Home(settings.home))
    if (metrics := machine.check_metrics_port(settings, runs=runs)) is not None:
        yield metrics
    yield await machine.check_gpu(settings)
    async for found in stores.check_stores(settings):
        yield found
    for found in check_model_files(settings):
        yield found
    async for found in check_upstreams(settings, ask=ask_upstreams):
        yield found
    if settings.mail is not None:
        yield await check_mail(settings.mail)


async def check_mail(mail: MailConfig) -> Diagnosis:
    """See whether the password is set and the server can be reached; sends nothing."""
    if mail.password_env is not None:
        try:
            read_secret(mail.password_env, "mail.password_env")
        except SettingsError as error:
            return Diagnosis("mail", "fails", str(error), f"set {mail.password_env}")
    where = f"{mail.host}:{mail.port}"
    try:
        async with asyncio.timeout(MAIL_TIMEOUT_S):
            _, writer = await asyncio.open_connection(mail.host, mail.port)
            writer.close()
            await writer.wait_closed()
    except OSError as error:  # TimeoutError is one
        found = f"{where} does not answer: {error.strerror or type(error).__name__}"
        return Diagnosis("mail", "fails", found, "check host and port of [mail] and the network")
    return Diagnosis("mail", "ok", f"{where} accepts connections")


def check_model_files(settings: Settings) -> list[Diagnosis]:
    """Look over each model's folder, or whether it is to be fetched from a hub."""
    found = []
    for model in settings.models:
        if model.replicas:
            continue
        name = f"model {model.name}"
        if (fetched := model.repository or model.source) is not None:
            found.append(Diagnosis(name, "ok", f"{fetched}, fetched at the start"))
            continue
        alone = msgspec.structs.replace(settings, models=(model,), file_store=None)
        try:
            check_models(alone, weights=True)
        except SettingsError as error:
            advice = "put the missing files there, or name another folder or org/name"
            found.append(Diagnosis(name, "fails", str(error), advice))
        else:
            found.append(Diagnosis(name, "ok", str(model.path)))
    return found


async def check_upstreams(settings: Settings, *, ask: bool) -> AsyncIterator[Diagnosis]:
    """See whether the key of each upstream is set, and with `ask` whether the upstream takes it."""
    for model in settings.models:
        for position, replica in enumerate(model.replicas):
            name = f"upstream {model.name}/{position}"
            try:
                key = read_api_key(replica, settings.secret_key_file)
            except SettingsError as error:
                where = replica.api_key_env or f"the key as one line of {replica.api_key_file}"
                yield Diagnosis(name, "fails", str(error), f"set {where}")
                continue
            if ask:
                yield await ask_upstream(name, replica.upstream, key)
            else:
                said = "its key is set" if key else "it wants no key"
                yield Diagnosis(name, "ok", f"{said}; --ask-upstreams tries it")


async def ask_upstream(name: str, url: str, key: str | None) -> Diagnosis:
    """Ask an upstream for its models, as any client of OpenAI's API would."""
    import httpx

    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        async with httpx.AsyncClient(timeout=UPSTREAM_TIMEOUT_S, trust_env=False) as http:
            answer = await http.get(f"{url}/models", headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return Diagnosis(
            name,
            "fails",
            f"does not answer: {type(error).__name__}",
            "check its URL and the network",
        )
    if answer.status_code in (401, 403):
        found = f"refuses the key: status {answer.status_code}"
        return Diagnosis(name, "fails", found, "give it a key that it knows")
    if answer.status_code >= 500:
        found = f"answers with status {answer.status_code}"
        return Diagnosis(name, "warning", found, "wait, or ask who runs it")
    return Diagnosis(name, "ok", f"answers with status {answer.status_code}")
