"""Fetches models that the settings name `org/name` before anything starts, and pins them.

HOME/commits.json remembers the commit that each revision meant when it was first served: a restart
serves the same weights, without asking the hub, until the operator names another revision or
deletes the file. Knows neither torch nor what is in the folders.
"""

from __future__ import annotations

from functools import partial

import msgspec

from engine.errors import ConfigError
from engine.text.hub import fetch
from gateway.home import Home
from gateway.processes.start_view import StartView, download_of
from gateway.settings.file import SettingsError
from gateway.settings.load import Settings
from gateway.settings.models import ModelConfig


def with_folders(settings: Settings, *, weights: bool, view: StartView) -> Settings:
    """Return the settings with the path that each repository was fetched to.

    weights: False for a process that starts no engine: it needs the texts alone. view: it shows
    what is downloaded, and for how long still. Raises:
    SettingsError (one line that says what is the matter), OSError.
    """
    if not any(model.repository for model in settings.models):
        return settings
    home = Home(settings.home)
    commits = _read(home)
    models = []
    for model in settings.models:
        if model.repository is not None:
            model = _fetch(model, model.repository, commits, settings, weights, view)
        models.append(model)
    home.create()
    fresh = home.commits.with_suffix(".new")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(commits)))
    fresh.rename(home.commits)
    return msgspec.structs.replace(settings, models=tuple(models))


def _fetch(
    model: ModelConfig,
    repository: str,
    commits: dict[str, str],
    settings: Settings,
    weights: bool,
    view: StartView,
) -> ModelConfig:
    """Fetch a repository and note its commit in `commits`."""
    asked = repository if model.revision is None else f"{repository}@{model.revision}"
    needs_weights = weights and bool(model.started) and model.engine_options.load_format != "dummy"
    try:
        found = fetch(
            repository,
            revision=commits.get(asked, model.revision),
            weights=needs_weights,
            tell=partial(view.download, repository),
        )
        view.end(download_of(repository))
    except ConfigError as error:
        raise SettingsError(f"model {model.name}: {error.message}") from None
    if asked not in commits:
        view.say(
            f"{asked} is served at commit {found.commit}, until {Home(settings.home).commits} "
            "is deleted."
        )
    commits[asked] = found.commit
    return msgspec.structs.replace(model, path=found.folder)


def _read(home: Home) -> dict[str, str]:
    try:
        return msgspec.json.decode(home.commits.read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError as error:
        raise SettingsError(f"{home.commits}: {error}") from None
