"""`tollgate prices`: a draft is shown, then applied by the digest that was shown, or not at all."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from click.testing import CliRunner

from gateway.cli.main import tollgate
from tests.gateway.cli.shared.fake_gateway import serving
from tests.gateway.cli.test_main import environ, folder, invoke

__all__ = ["environ", "folder"]


def test_prices_are_imported_seen_and_applied(environ: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "litellm.json"
    file.write_text('{"theirs": {"input_cost_per_token": 2e-07, "output_cost_per_token": 4e-07}}')
    model = ("--model", "penny=theirs")

    def prices(command: str, *arguments: str) -> tuple[int, str]:
        done = invoke(environ, "prices", command, *arguments)
        return done.exit_code, done.output

    status, text = prices("check", "--litellm", str(file), *model)
    assert (status, text.splitlines()) == (
        1,
        [
            "ours -> litellm: penny batch uncached_input: 0.05 -> none",
            "ours -> litellm: penny batch cache_read: 0.005 -> none",
            "ours -> litellm: penny batch cache_write_5m: 0 -> none",
            "ours -> litellm: penny batch output: 0.2 -> none",
            "ours -> litellm: penny default uncached_input: 0.1 -> 0.2 (+100.0 %)",
            "ours -> litellm: penny default cache_read: 0.01 -> none",
            "ours -> litellm: penny default cache_write_5m: 0 -> none",
        ],
    )
    status, text = prices("import", "--from", "litellm", str(file), *model)
    assert status == 0 and "penny default uncached_input: 0.1 -> 0.2 (+100.0 %)" in text
    draft, digest = (re.search(rf"{name}: (.+)", text) for name in ("Draft", "Digest"))
    assert draft is not None and digest is not None
    shown = prices("diff", draft[1])[1].splitlines()
    assert shown[-1] == digest[0]
    begins = re.search('valid_from = "(.+)T00:00:00Z"', Path(draft[1]).read_text())
    assert begins is not None and shown[1].endswith(f"(+100.0 %), from {begins[1]}")
    status, text = prices("apply", draft[1], "--digest", "0" * 64)
    assert status == 2 and "this is not what was shown" in text
    assert prices("apply", draft[1], "--digest", digest[1])[0] == 0
    status, text = prices("apply", draft[1], "--digest", digest[1])
    assert status == 2 and "it has been applied already" in text
    assert prices("import", "--from", "litellm", str(file), *model)[1] == "Nothing differs.\n"
    past = ("--valid-from", "2026-11-02")
    file.write_text('{"theirs": {"output_cost_per_token": 9e-07}}')
    status, text = prices("import", "--from", "litellm", str(file), *model, *past)
    assert status == 2 and "begins in the past" in text and "Draft:" not in text
    late = Path(draft[1])
    late.write_text(re.sub(r'valid_from = "[^"]+"', 'valid_from = "2026-11-02"', late.read_text()))
    digest = re.search("Digest: (.+)", prices("diff", draft[1])[1])
    assert digest is not None
    status, text = prices("apply", draft[1], "--digest", digest[1])
    assert status == 2 and "begins in the past" in text


def test_what_nobody_knows_is_said_and_what_cannot_be_read_is_one_line(
    environ: dict[str, str], tmp_path: Path
) -> None:
    genai, litellm = tmp_path / "genai.json", tmp_path / "litellm.json"
    genai.write_text(json.dumps([{"id": "p", "models": [{"id": "m", "prices": {}}]}]))
    litellm.write_text('{"m": {}}')
    files = ("--genai-prices", str(genai), "--litellm", str(litellm))
    alike = invoke(environ, "prices", "check", *files, "--model", "m", "--model", "x")
    assert (alike.exit_code, alike.output.splitlines()[-1]) == (
        0,
        "What several of them price costs the same.",
    )
    assert {"genai-prices: knows no x", "litellm: knows no x"} < set(alike.output.splitlines())
    litellm.write_text("[")
    broken = invoke(environ, "prices", "import", "--from", "litellm", str(litellm))
    assert broken.exit_code == 2 and "tollgate: litellm: not in its format" in broken.output
    assert invoke(environ, "prices", "check").exit_code == 2


def test_what_cannot_be_a_draft_is_refused_and_leaves_the_one_that_is_there(
    environ: dict[str, str], tmp_path: Path
) -> None:
    litellm, noise = tmp_path / "litellm.json", tmp_path / "noise.json"
    noise.write_bytes(b"\xff" + os.urandom(99))
    litellm.write_text(
        """{"theirs": {"input_cost_per_token": 2e-07}, "huge": {"input_cost_per_token": 1e20}}"""
    )

    def imported(model: str, *arguments: str, file: Path = litellm) -> tuple[int, str]:
        source = ("--from", "litellm", "--model", f"penny={model}", str(file))
        done = invoke(environ, "prices", "import", *source, *arguments)
        return done.exit_code, done.output

    status, text = imported("theirs")
    found = re.search("Draft: (.+)", text)
    assert status == 0 and found is not None
    draft = Path(found[1])
    good = draft.read_bytes()
    for model, file, refused in (
        (
            "huge",
            litellm,
            "litellm: huge: input_cost_per_token: 1E+20 is too large",
        ),
        ("nope", litellm, "litellm: knows no nope"),
        ("theirs", noise, f"{noise}: not UTF-8"),
    ):
        status, text = imported(model, file=file)
        assert (status, text) == (2, f"tollgate: {refused}\n")
        assert draft.read_bytes() == good
    status, text = imported("theirs", "--valid-from", "0001-01-01")
    assert status == 2 and "begins in the past" in text and "Draft:" not in text
    assert list(draft.parent.iterdir()) == [draft]


def test_each_command_says_what_its_exit_codes_mean(environ: dict[str, str]) -> None:
    for command in ((), ("import",), ("diff",), ("apply",), ("check",)):
        told = " ".join(invoke(environ, "prices", *command, "--help").output.split())
        done = "0 nothing differs; 1 prices differ" if "check" in command else "0 done; 1 a file"
        assert f"Exit codes: {done}" in told and "; 2 it cannot be done as asked" in told


def test_a_running_gateway_shows_and_stores_the_draft(tmp_path: Path) -> None:
    draft = tmp_path / "draft.toml"
    draft.write_text('# ours\n[[price]]\nmodel = "m"\nvalid_from = 2027-01-01\noutput = 0.10\n')
    with serving() as gateway:
        homes = [{"home": "host:/home", "in_force": True, "problem": None}]
        gateway.on("GET", "/v1/admin/settings", {"homes": homes})
        change = {"changes": ["m default output: none -> 0.1"]}
        gateway.on("POST", "/v1/admin/settings/price_books", change, status=201)

        def prices(command: str, *arguments: str) -> tuple[int, str]:
            target = ("--url", gateway.url, "--key", "sk-test", str(draft))
            done = CliRunner().invoke(tollgate, ["prices", command, *arguments, *target])
            return done.exit_code, done.output

        status, text = prices("diff")
        head, digest = text.rsplit("Digest: ", 1)
        assert (status, head) == (0, "# ours\nm default output: none -> 0.1\n")
        assert prices("apply", "--digest", "0" * 64)[0] == 2
        assert {each[2].get("dry_run", [""])[0] for each in gateway.asked} == {"true"}
        status, text = prices("apply", "--digest", digest.strip())
        assert status == 0 and text.startswith("Applied as "), text
        (body,) = [each[3] for each in gateway.asked if each[0] == "POST" and not each[2]]
        assert body["name"].endswith(digest[:12])
        assert body["content"] == {
            "price": [{"model": "m", "valid_from": "2027-01-01", "output": "0.10"}]
        }
        draft.write_text("[[price]]\n")
        assert prices("diff")[0] == 2
