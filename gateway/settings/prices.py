"""Reads the price book that settings name: the files, and what operators stored beside them."""

from __future__ import annotations

from billing.pricing.price_book import PriceBook
from gateway.settings.load import Settings


def load_prices(settings: Settings) -> PriceBook:
    """Blocks. Raises: PriceBookError."""
    return PriceBook.load(settings.price_books, bases=settings.bases, stored=settings.stored_prices)
