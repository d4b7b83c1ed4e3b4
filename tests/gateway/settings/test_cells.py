"""`[[cell.peer]]`: what cannot be is named in one line, and models get places for what is lent."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.fleet.cells.lending_plan import lending_of, loans_of
from gateway.home import engine_number
from gateway.settings.changes import changes_between
from gateway.settings.file import SettingsError
from gateway.settings.load import Settings, load
from gateway.settings.models import FIRST_BORROWED

LISTEN = '[fleet]\njoin_listen = "tcp:0.0.0.0:9400"\n'
CELL = '[cell]\nname = "eu"\n[[cell.peer]]\n'
LEND = 'lend_to = "tcp:us.example.com:9400"\n'
TOKEN = 'token_file = "us.token"\n'


def read(tmp_path: Path, text: str) -> Settings:
    config = tmp_path / "tollgate.toml"
    config.write_text(text)
    return load({"home": tmp_path, "config": config}, {})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (CELL + "borrow = 1", "cell.peer[0].name: missing"),
        (CELL + 'name = "US"', "cell.peer[0].name: expected 1 to 32 of a-z"),
        (CELL + 'name = "eu"\nborrow = 1', "cell.peer[0].name: 'eu' is this cell or another"),
        (CELL + 'name = "us"', "cell.peer[0]: wants borrow, lend_to or both"),
        (CELL + 'name = "us"\nborrow = 17', "cell.peer[0].borrow: expected `int` <= 16"),
        (CELL + 'name = "us"\nborrow = 1', "cell.peer[0].borrow: wants fleet.join_listen"),
        (CELL + 'name = "us"\n' + LEND, "cell.peer[0]: lend_to and token_file go together"),
        (CELL + 'name = "us"\nborrow = 1\n' + TOKEN, "cell.peer[0]"),
        (CELL + 'name = "us"\nlend_to = "https://us"', "cell.peer[0].lend_to: expected 'tcp:host"),
        (CELL + 'name = "us"\nurl = "x"', "cell.peer[0].url: unknown key"),
        (
            LISTEN + CELL + 'name = "us"\nborrow = 1\n[[cell.peer]]\nname = "us"\nborrow = 1',
            "cell.peer[1].name: 'us' is this cell or another",
        ),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(SettingsError) as found:
        read(tmp_path, text)
    assert complaint in str(found.value) and "\n" not in str(found.value)


def test_models_get_places_for_what_each_cell_lends(tmp_path: Path) -> None:
    more = '[[cell.peer]]\nname = "asia"\nborrow = 1\n'
    settings = read(tmp_path, LISTEN + CELL + 'name = "us"\nborrow = 2\n' + more)
    (penny,) = settings.models
    numbers = [engine_number(each.address) for each in penny.borrowed]
    assert numbers == [FIRST_BORROWED, FIRST_BORROWED + 1, FIRST_BORROWED + 2]
    names = [penny.replica_name(each) for each in penny.asked_engines]
    assert names == ["penny/0", "penny/us:2000", "penny/us:2001", "penny/asia:2002"]
    assert penny.started == penny.engines and len(penny.engines) == 1
    assert lending_of(settings.models, settings.cell) is None
    alone = read(tmp_path, "")
    assert alone.models[0].borrowed == () and alone.models[0].replica_name("x") == "penny"
    (shown,) = changes_between(alone, settings)[1:]
    assert shown.path.startswith("cell"), "places of models are no change that anybody wrote"


def test_each_engine_is_lent_to_each_cell_by_a_name_of_its_own(tmp_path: Path) -> None:
    folder = Path(__file__).resolve().parents[3] / "models" / "penny"
    models = f'[[model]]\nname = "a/b"\npath = "{folder}"\nprefill = 1\ndecode = 2\n'
    models += '[[model]]\nname = "far"\nupstream = "http://h/v1"\n'
    settings = read(tmp_path, models + CELL + 'name = "us"\n' + LEND + TOKEN)
    found = lending_of(settings.models, settings.cell)
    assert found is not None and lending_of(settings.models, None) is None
    assert found.borrowers[0].token_file.is_absolute()
    loans = loans_of(found)
    assert [each.name for each in loans] == ["us@a%2Fb@0", "us@a%2Fb@1"]
    assert [engine_number(each.address) for each in loans] == [2, 3], "no engine of prompts alone"
