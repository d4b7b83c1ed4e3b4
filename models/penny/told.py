"""Makes what the user tells penny about itself, and the questions about it some messages later.

It knows no roles, no chat template and no tools.
"""

from __future__ import annotations

from models.penny.talk import Exchange, sentence, table
from models.penny.toolbox import value_of
from models.penny.words import Draw


def told(draw: Draw) -> tuple[list[Exchange], list[Exchange]]:
    """One to three exchanges in which the user tells something, and the questions about them.

    The first is the name in half of all cases, so that it is what penny keeps best.
    """
    entries = table("told")["told"]
    chosen = draw.rng.sample(entries, draw.rng.choices([1, 2, 3], [6, 3, 1])[0])
    if draw.chance(0.5):
        chosen = [entries[0], *(entry for entry in chosen if entry is not entries[0])]
    telling, asking = list[Exchange](), list[Exchange]()
    for entry in chosen:
        value = value_of(draw, entry["kind"])
        telling.append((draw.pick(entry["say"]).format(v=value), entry["reply"].format(v=value)))
        asking.append((draw.pick(entry["ask"]), entry["answer"].format(v=value)))
    return telling, asking


def at_once(draw: Draw) -> Exchange:
    """The user tells and asks in one message."""
    entry = draw.pick(table("told")["told"])
    value = value_of(draw, entry["kind"])
    said = sentence(draw.pick(entry["say"]).format(v=value)).rstrip(".!")
    return f"{said}. {draw.pick(entry['ask'])}", entry["answer"].format(v=value)


def by_system(draw: Draw) -> tuple[str, Exchange]:
    """A sentence of the system prompt says the user's name, and the user asks for it."""
    entry = table("told")["told"][0]
    value = draw.person()
    said = draw.pick(["The user is called {v}.", "The user's name is {v}.", "You talk with {v}."])
    return said.format(v=value), (draw.pick(entry["ask"]), entry["answer"].format(v=value))


def not_told(draw: Draw) -> Exchange:
    """The user asks for what nobody has told."""
    entry = draw.pick(table("told")["told"])
    return draw.pick(entry["ask"]), entry["unknown"]
