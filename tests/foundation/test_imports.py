"""Imports without the collector, and of parts of libraries."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from foundation.imports import hiding, import_part, importing


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_collected_inside_and_what_was_made_there_is_never_looked_through() -> None:
    frozen = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]  # type: ignore[var-annotated]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(made)


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with importing():
        pass
    assert not gc.isenabled()


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`whole.package` imports all of itself, and `extra` where that is installed."""
    package = tmp_path / "whole" / "package"
    package.mkdir(parents=True)
    (tmp_path / "extra.py").write_text("")
    (tmp_path / "whole" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("from .light import made\nfrom . import heavy\n")
    (package / "light.py").write_text("made, _own = 1, 2\n")
    (package / "heavy.py").write_text(
        "try:\n    import extra\nexcept ImportError:\n    extra = None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("whole", "extra")]:
        del sys.modules[name]


def test_a_part_of_a_package_stands_for_it(library: None) -> None:
    import_part("whole.package", "light")
    package = import_module("whole.package")
    assert package.made == 1
    assert not hasattr(package, "_own")
    assert "whole.package.heavy" not in sys.modules
    assert import_module("whole.package.heavy").extra is not None


def test_a_package_that_is_imported_stays_whole(library: None) -> None:
    whole = import_module("whole.package")
    import_part("whole.package", "light")
    assert import_module("whole.package") is whole


def test_a_part_of_nothing_is_not_found(library: None) -> None:
    with pytest.raises(ModuleNotFoundError):
        import_part("whole.nothing", "light")


def test_a_part_stands_for_a_package_that_is_in_no_other(library: None) -> None:
    import_part("whole", "package")
    assert import_module("whole").made == 1


def test_a_hidden_package_is_there_again_afterwards(library: None) -> None:
    with hiding("extra"):
        assert import_module("whole.package.heavy").extra is None
    assert import_module("extra").__name__ == "extra"
    with hiding("extra"):  # it is imported already
        assert import_module("extra") is sys.modules["extra"]
