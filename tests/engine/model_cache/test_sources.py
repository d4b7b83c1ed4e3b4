"""Sources are read, or refused in a line; folders are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.model_cache.sources import ModelSource, is_source, parse_source


@pytest.mark.parametrize(
    ("written", "source"),
    [
        ("hf:acme/penny", ModelSource("hf", "acme/penny", "")),
        ("hf:acme/penny@refs/pr/1", ModelSource("hf", "acme/penny", "refs/pr/1")),
        ("s3://models/llama/8b", ModelSource("s3", "models", "llama/8b")),
        ("s3://models", ModelSource("s3", "models", "")),
    ],
)
def test_a_source_is_read_as_a_text_and_as_a_path(written: str, source: ModelSource) -> None:
    assert parse_source(written) == parse_source(Path(written)) == source
    assert str(source) == written and is_source(Path(written))
    assert parse_source(str(source)) == source


@pytest.mark.parametrize(
    "written",
    [
        *("hf:penny", "hf:acme/penny@", "hf:acme/penny@../x", "hf:../penny", "hf:a/b@v1 ", "s3://"),
        *("s3://B/x", "s3://bucket/../x", "s3://bucket/a//b c", "s3:", "s3://bucket/" + "x" * 2000),
    ],
)
def test_what_is_none_is_one_line(written: str) -> None:
    assert is_source(written)
    with pytest.raises(ConfigError, match=r"^'(hf|s3):.*expected hf:ORG/NAME") as refused:
        parse_source(written)
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("written", ["models/penny", "/models/hf:x", "acme/penny", "./s3:/x"])
def test_folders_are_no_sources(written: str) -> None:
    assert not is_source(written) or written.startswith("./")
