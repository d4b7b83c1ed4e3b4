"""`tollgate prices`: takes prices that others publish as drafts, shown first and then applied.

A running gateway stores what is applied in Postgres, beside the files, and all price by it. Where
none runs, it lies in HOME/price_books: a price book is files, and needs no database.
"""

from __future__ import annotations

import hmac
import os
import time
import tomllib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from click.exceptions import Exit

from gateway.cli.shared.command import refuse
from gateway.cli.shared.in_force import find_running, with_settings_in_force
from gateway.cli.shared.stored import SETTINGS, dry_run_of, until_in_force
from gateway.cli.shared.tables import printable
from gateway.cli.shared.target import Gateway, GatewayTarget, open_gateway, with_target
from gateway.home import Home
from gateway.settings.load import Settings

if TYPE_CHECKING:
    from billing.pricing.drafts import Difference, Prices
    from billing.pricing.price_book import PriceBook
    from billing.pricing.sources import PublishedPrices, Source

BOOKS = f"{SETTINGS}/price_books"
DAY = click.DateTime(["%Y-%m-%d"])
FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
MODELS = click.option(
    "--model",
    "models",
    multiple=True,
    metavar="OURS[=THEIRS]",
    help="A model, and its name in the source. Default: all models that are served, by the names "
    "that their upstreams use.",
)

EXITS = (
    "Exit codes: 0 done; 1 a file could not be read or written; 2 it cannot be done as asked, such"
    " as a model that the source does not know, a draft that is none, a digest of something else."
)
EXITS_OF_CHECK = (
    "Exit codes: 0 nothing differs; 1 prices differ, or a file could not be read; 2 it cannot be"
    " done as asked, such as a file that is not in its source's format."
)


@click.group(epilog=EXITS)
def prices() -> None:
    """Compare prices with published ones, and import them."""


@prices.command("import", epilog=EXITS)
@with_settings_in_force
@click.option(
    *("--from", "source"),
    type=click.Choice(["genai-prices", "litellm"]),
    required=True,
    help="The source of FILE.",
)
@click.option("--valid-from", type=DAY, help="The first day of the prices, UTC. Default: tomorrow")
@MODELS
@click.argument("file", type=FILE)
async def import_(
    settings: Settings,
    source: Source,
    valid_from: datetime | None,
    models: tuple[str, ...],
    file: Path,
) -> None:
    """Make a draft of the prices in FILE that differ from the price book.

    FILE: the data.json of genai-prices, or litellm's model_prices_and_context_window.json.
    """
    from billing.pricing.drafts import draft_of

    begins = valid_from or datetime.now(UTC) + timedelta(days=1)
    begins = begins.replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=UTC)
    if begins.timestamp() <= time.time():
        refuse("--valid-from: begins in the past; what was admitted is priced", status=2)
    book = book_of(settings)
    wanted = named(models, settings)
    published = dict(published_of(source, file, wanted, begins))
    for theirs in (wanted[ours] for ours in wanted if ours not in published):
        message = f"{source}: knows no {theirs}"
        if models:
            refuse(message, status=2)
        click.echo(message)
    content = draft_of(published, book, begins, source).encode()
    if not content:
        click.echo("Nothing differs.")
        return
    path = Home(settings.home).price_drafts / f"{source}-{begins:%Y-%m-%d}.toml"
    changes, digest = changed_by(content, path, book)
    write(path, content)
    click.echo(f"Draft: {path}")
    show(content, changes, digest)


@prices.command(epilog=EXITS)
@with_target
@click.argument("draft", type=FILE)
async def diff(settings: Settings, target: GatewayTarget, draft: Path) -> None:
    """Show what DRAFT would change, and the digest to apply it by.

    Compared with the prices of the running gateway; where none runs, with those of the files.
    """
    content = draft.read_bytes()
    async with refusing(), open_gateway(target) as gateway:
        if is_there(settings, target):
            show(content, *await changed_there(gateway, content, draft))
        else:
            show(content, *changed_by(content, draft, book_of(settings)))


@prices.command(epilog=EXITS)
@with_target
@click.option("--digest", required=True, help="The digest that `diff` printed.")
@click.argument("draft", type=FILE)
async def apply(settings: Settings, target: GatewayTarget, draft: Path, digest: str) -> None:
    """Put DRAFT in force, if neither it nor the prices changed since `diff`.

    The running gateway stores it beside its files, and all gateways of its database price by it.
    Where none runs, it is copied into HOME/price_books, for the next start or `tollgate migrate`.
    """
    content = draft.read_bytes()
    async with refusing(), open_gateway(target) as gateway:
        if not is_there(settings, target):
            apply_here(settings, content, draft, digest)
            return
        changes, known = await changed_there(gateway, content, draft)
        check_digest(digest, known, changes)
        await gateway.send("POST", BOOKS, {"name": name_of(known), "content": tables_of(content)})
        await until_in_force(gateway)
    click.echo(f"Applied as {name_of(known)}: all workers price by it.")


@asynccontextmanager
async def refusing() -> AsyncIterator[None]:
    """Exit where a price book is none."""
    from billing.errors import BillingError

    try:
        yield
    except BillingError as error:
        refuse(error, status=2)


def is_there(settings: Settings, target: GatewayTarget) -> bool:
    """Tell whether a gateway is asked: the one of --url, or the one that runs for the home."""
    return target.why == "--url" or find_running(Home(settings.home)) is not None


async def changed_there(
    gateway: Gateway, content: bytes, draft: Path
) -> tuple[Sequence[object], str]:
    """Return the changes that a draft makes to the prices of a gateway, and the digest of both.

    Raises: PriceBookError, where it is none; GatewayError, where it cannot be applied.
    """
    from billing.pricing.drafts import digest_of
    from billing.pricing.price_book import PriceBook

    PriceBook.parse(content, str(draft))  # says where a mistake stands
    body = {"name": "draft", "content": tables_of(content)}
    changes = (await gateway.send("POST", BOOKS, body, dry_run_of(True)))["changes"]
    return changes, digest_of(content, changes)


def tables_of(content: bytes) -> Any:
    """Return the tables of a price book in the types of JSON; decimals as they are written."""
    found = tomllib.loads(content.decode(), parse_float=str)
    return msgspec.to_builtins(found, enc_hook=str)


def name_of(digest: str) -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}-{digest[:12]}"


def check_digest(given: str, known: str, changes: Sequence[object]) -> None:
    """Exit where a draft changes nothing, or is not the one that was shown."""
    if not changes:
        refuse("the draft changes nothing: it has been applied already", status=2)
    if not hmac.compare_digest(given.encode(), known.encode()):
        refuse("this is not what was shown: look at `tollgate prices diff` again", status=2)


def apply_here(settings: Settings, content: bytes, draft: Path, digest: str) -> None:
    from billing.pricing.price_book import PriceBook

    changes, known = changed_by(content, draft, book_of(settings))
    check_digest(digest, known, changes)
    for entry in PriceBook.parse(content, str(draft)):
        if entry.valid_from.timestamp() <= time.time():
            refuse(f"{entry.where}: begins in the past; what was admitted is priced", status=2)
    PriceBook.load([*settings.price_books, draft], bases=settings.bases)
    path = Home(settings.home).price_books / f"{name_of(known)}.toml"
    write(path, content)
    click.echo(f"Applied: {path}")
    click.echo("Nothing runs here. Gateways that run alone: `tollgate migrate`, then SIGHUP.")


@prices.command(epilog=EXITS_OF_CHECK)
@with_settings_in_force
@click.option("--genai-prices", "genai", type=FILE, help="The data.json of genai-prices.")
@click.option("--litellm", type=FILE, help="The model_prices_and_context_window.json of litellm.")
@click.option("--at", type=DAY, help="Compare the prices of this day, UTC. Default: now")
@MODELS
async def check(
    settings: Settings,
    genai: Path | None,
    litellm: Path | None,
    at: datetime | None,
    models: tuple[str, ...],
) -> None:
    """Compare our prices with those of both sources, and these with each other."""
    files: dict[Source, Path] = {}
    if genai is not None:
        files["genai-prices"] = genai
    if litellm is not None:
        files["litellm"] = litellm
    if not files:
        refuse("name a file: --genai-prices, --litellm or both", status=2)
    wanted = named(models, settings)
    moment = (at or datetime.now(UTC)).replace(tzinfo=UTC)
    sides = sides_of(book_of(settings), files, wanted, moment)
    for source in files:
        for model in wanted.keys() - sides[source].keys():
            click.echo(f"{source}: knows no {wanted[model]}")
    differing = list(disagreements(sides))
    for line in differing:
        click.echo(line)
    if differing:
        raise Exit(1)
    click.echo("What several of them price costs the same.")


def sides_of(
    book: PriceBook, files: Mapping[Source, Path], wanted: Mapping[str, str], at: datetime
) -> dict[str, dict[str, Prices]]:
    """Group by who publishes a price, then by our name of the model."""
    from billing.pricing.drafts import book_prices

    mine = {model: book_prices(book, model, at.timestamp()) for model in wanted}
    sides: dict[str, dict[str, Prices]] = {"ours": {m: found for m, found in mine.items() if found}}
    for source, file in files.items():
        found = published_of(source, file, wanted, at)
        sides[source] = {model: published.prices for model, published in found}
    return sides


def disagreements(sides: Mapping[str, Mapping[str, Prices]]) -> Iterator[str]:
    from billing.pricing.drafts import differences

    for one, other in combinations(sides, 2):
        for model, known in sides[one].items():
            if model in sides[other]:
                for each in differences(model, known, sides[other][model]):
                    yield f"{one} -> {other}: {each}"


def book_of(settings: Settings) -> PriceBook:
    from gateway.settings.prices import load_prices

    return load_prices(settings)


def named(models: Sequence[str], settings: Settings) -> dict[str, str]:
    """Return the source's name of each model, by our name."""
    if models:
        pairs = (model.partition("=") for model in models)
        return {ours: theirs or ours for ours, _, theirs in pairs}
    return {
        model.name: model.replicas[0].upstream_model if model.replicas else model.name
        for model in settings.models
    }


def published_of(
    source: Source, file: Path, wanted: Mapping[str, str], on: datetime
) -> Iterator[tuple[str, PublishedPrices]]:
    """Return the published prices of the models that the source knows, by our name."""
    from billing.errors import PriceBookError
    from billing.pricing.sources import MAX_SOURCE_BYTES, PriceSource

    if file.stat().st_size > MAX_SOURCE_BYTES:
        raise PriceBookError(f"{file}: larger than {MAX_SOURCE_BYTES} bytes")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PriceBookError(f"{file}: not UTF-8") from error
    found = PriceSource(source, text, on.date())
    for ours, theirs in wanted.items():
        published = found.of(theirs)
        if published is not None:
            yield ours, published


def changed_by(content: bytes, draft: Path, book: PriceBook) -> tuple[list[Difference], str]:
    """Return the changes that a draft makes, and the digest of both.

    Raises: PriceBookError, where it cannot be applied.
    """
    from billing.pricing.drafts import changes_of, digest_of
    from billing.pricing.price_book import PriceBook

    changes = changes_of(PriceBook.parse(content, str(draft)), book)
    return changes, digest_of(content, changes)


def show(content: bytes, changes: Sequence[object], digest: str) -> None:
    for line in content.splitlines():
        if line[:1] == b"#":
            click.echo(line.decode())
    for each in changes:
        click.echo(printable(str(each)))
    click.echo(f"Digest: {digest}")


def write(path: Path, content: bytes) -> None:
    """Write the file whole or not at all."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
