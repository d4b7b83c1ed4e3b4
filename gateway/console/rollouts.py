"""Reads rollouts as an operator looks at them: each version of each model, where it runs or is to
run, how far it is, and the change that brought it.

A home tells what it runs (`gateway.installation.model_versions`); who changed a model stands in the
audit log of the operator's organization.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from billing.queries import Query
from gateway.audit.tables import entries
from gateway.console.attention import TodoItem
from gateway.console.changes import SETTINGS
from gateway.console.hidden import visible
from gateway.installation.items import HomeState
from gateway.installation.model_versions import UNDER_WAY, ModelVersion
from gateway.registry.rollout import ModelRollout
from gateway.tenancy.audit_pages import AuditEvent, select_entries, to_event

CHANGES = ("model.created", "model.updated", SETTINGS)
MAX_CHANGES = 200
"""The newest that are read: a model that was changed before them is changed by nobody known."""
SLACK_S = 5
"""A change is recorded so long after the version serves at most: both are done in one reload."""
MAX_CHARS = 200
STATES: Mapping[str, tuple[str, str]] = {
    "starting": ("starts", "wait"),
    "warming": ("warms up", "wait"),
    "ready": ("ready", "wait"),
    "serving": ("serves", "ok"),
    "restarting": ("starts again", "err"),
    "draining": ("drains", "plain"),
    "failed": ("failed", "err"),
}
"""The words of states and their tones."""
_ORDER = ("failed", "restarting", *UNDER_WAY, "draining", "serving")


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a model in a home. `change`: what brought it, where that is known."""

    home: str
    version: ModelVersion
    change: AuditEvent | None

    @property
    def state(self) -> tuple[str, str]:
        return STATES.get(self.version.state, (visible(self.version.state), "plain"))


def changes_of_models_query(org: str) -> Query[list[AuditEvent]]:
    """Return the query of the newest changes of models, the newest first. `org`: the operator's."""
    newest = select_entries(org).where(entries.c.action.in_(CHANGES))
    newest = newest.order_by(entries.c.sequence.desc()).limit(MAX_CHANGES)
    return Query(newest, lambda rows: [to_event(row) for row in rows])


def rollouts_of(homes: Iterable[HomeState], events: Sequence[AuditEvent]) -> list[Rollout]:
    """Return all versions that homes tell of, those first that need somebody. `events`: of
    `changes_of_models_query`."""
    homes = [*homes]
    known = {each.model for home in homes for each in home.running.models}
    by_model: dict[str, list[AuditEvent]] = {model: [] for model in known}
    for event in events:
        for model in models_in(event, known):
            by_model[model].append(event)
    found = [
        Rollout(
            home=home.home,
            version=each,
            change=_change_of(each, home.running.models, by_model[each.model]),
        )
        for home in homes
        for each in home.running.models
    ]
    return sorted(found, key=_rank)


def models_in(event: AuditEvent, known: Collection[str]) -> set[str]:
    """Return the models that an entry is about."""
    if event.action != SETTINGS:
        return {event.target} & {*known}
    lines = msgspec.json.decode(event.after or "{}").get("changes") or ()
    return {model for each in lines if (model := _model_of(str(each), known)) is not None}


def _model_of(line: str, known: Collection[str]) -> str | None:
    """Return the model of a line of `gateway.settings.changes`, `~ models.NAME.path: …`: the
    longest name that fits, for names have dots, too."""
    about = line[2:]
    fitting = (
        each
        for each in known
        if about.startswith((f"models.{each}.", f"models.{each} ", f"models.{each}:"))
    )
    return max(fitting, key=len, default=None)


def _change_of(
    version: ModelVersion, others: Iterable[ModelVersion], events: Sequence[AuditEvent]
) -> AuditEvent | None:
    """Find the newest change before a version served; of one that does not yet, the newest after
    the one that does."""
    if version.state in ("serving", "restarting"):
        until = version.since + SLACK_S
        return next((each for each in events if each.occurred_at.timestamp() <= until), None)
    if version.state == "draining":
        return None
    serving = (each for each in others if each.model == version.model and each.state == "serving")
    after = max((each.since for each in serving), default=0) + SLACK_S
    return next((each for each in events if each.occurred_at.timestamp() > after), None)


def _rank(rollout: Rollout) -> tuple[int, str, str]:
    state = rollout.version.state
    place = _ORDER.index(state) if state in _ORDER else len(_ORDER)
    return place, rollout.version.model, rollout.home


def rollout_needs(homes: Iterable[HomeState]) -> list[TodoItem]:
    """Tell which changes of settings were refused, which versions did not start, and which are on
    their way: once for each version, however many engines it has."""
    needs: list[TodoItem] = []
    for home in homes:
        versions = {(each.model, each.version, each.state): each for each in home.running.models}
        found = [_need_of(home, each) for each in versions.values()]
        needs += [each for each in found if each is not None]
        if home.problem and not any(each.state == "failed" for each in home.running.models):
            needs.append(_need("err", home.home, f"does not take up its settings: {home.problem}"))
    return needs


def _need_of(home: HomeState, version: ModelVersion) -> TodoItem | None:
    at = datetime.fromtimestamp(version.since, UTC)
    if version.state == "failed":
        text = f"{version.version} did not start, the version before stays: {version.problem}"
        return _need("err", version.model, text, at)
    if version.state in UNDER_WAY:
        words = "is ready, and taken up" if version.state == "ready" else STATES[version.state][0]
        return _need("wait", version.model, f"{version.version} {words} at {home.home}", at)
    return None


def version_needs(rollouts: Iterable[ModelRollout]) -> list[TodoItem]:
    """Tell which versions were taken back, as nobody has decided anything else of their models
    since, and which are on their way to everybody."""
    needs: list[TodoItem] = []
    for each in rollouts:
        version = f"version {each.to_version}"
        if each.state == "taken_back":
            text = f"{version} was taken back: {each.reason}"
            needs.append(_need("err", each.model, text, each.created_at))
        elif each.is_active:
            text = f"{version} is {each.state} at {each.percent}% of the organizations"
            needs.append(_need("wait", each.model, text, each.created_at))
    return needs


def _need(tone: str, title: str, text: str, at: datetime | None = None) -> TodoItem:
    text = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…"
    return TodoItem(
        word="Rollout", tone=tone, title=visible(title), text=visible(text), at=at, page="fleet"
    )
