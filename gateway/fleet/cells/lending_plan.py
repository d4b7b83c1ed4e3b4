"""Says which engines of this home are lent to which cells, as `tollgate up` tells the process that
lends them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import msgspec

from engine.transport.join_messages import Names, options_of
from gateway.fleet.joining.admission import JoinableModel
from gateway.settings.cells import CellConfig
from gateway.settings.file import decode_path
from gateway.settings.models import ModelConfig


class LentModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model whose engines are lent."""

    name: str
    folders: dict[str, Path]
    """Its files, as `engine.model_files` names them."""
    options: Names
    """Those that change what it says."""
    addresses: tuple[str, ...]
    """The addresses of its engines."""


class Borrower(msgspec.Struct, frozen=True, kw_only=True):
    """A cell that engines are lent to."""

    cell: str
    address: str
    token_file: Path


class LendingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Names what is lent to whom, as `tollgate up` writes it."""

    models: tuple[LentModel, ...]
    borrowers: tuple[Borrower, ...]


def lending_of(models: Sequence[ModelConfig], cell: CellConfig | None) -> LendingConfig | None:
    """Return what the settings lend; None: nothing. An engine that computes prompts for others of
    its model is of no use without those."""
    borrowers = tuple(
        Borrower(cell=each.name, address=each.lend_to, token_file=each.token_file)
        for each in (() if cell is None else cell.peer)
        if each.lend_to is not None and each.token_file is not None
    )
    lent = [each for each in models if each.starts_engine and not each.is_asleep]
    if not borrowers:
        return None
    return LendingConfig(
        models=tuple(
            LentModel(
                name=each.name,
                folders=JoinableModel.of(each).folders,
                options=options_of(each.engine_options),
                addresses=tuple(e for e in each.engines if e not in each.prefill),
            )
            for each in lent
        ),
        borrowers=borrowers,
    )


def read_lending(path: Path) -> LendingConfig:
    """Raises: OSError, msgspec.DecodeError."""
    return msgspec.json.decode(path.read_bytes(), type=LendingConfig, dec_hook=decode_path)


def write_lending(path: Path, config: LendingConfig) -> None:
    """Raises: OSError."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(config, enc_hook=str))
    fresh.rename(path)


class Loan(msgspec.Struct, frozen=True, kw_only=True):
    """One engine for one cell. `number`: among those of its model, whose identity there stays when
    another process has the engine's work."""

    borrower: Borrower
    model: LentModel
    number: int

    @property
    def address(self) -> str:
        return self.model.addresses[self.number]

    @property
    def name(self) -> str:
        """Return what tells it from all other loans of its home: the name of a file."""
        return f"{self.borrower.cell}@{quote(self.model.name, safe='')}@{self.number}"


def loans_of(config: LendingConfig) -> list[Loan]:
    return [
        Loan(borrower=borrower, model=model, number=number)
        for borrower in config.borrowers
        for model in config.models
        for number in range(len(model.addresses))
    ]
