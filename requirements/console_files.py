"""Fetch the files of others that the console's pages and their tests use, from npm:
`python console_files.py`.

They stand in the repository, so that no page asks another site. To take another release, change its
version and sums (`npm view NAME@VERSION dist.integrity`), and look at the pages.
"""

from __future__ import annotations

import base64
import hashlib
import io
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENDOR = "gateway/console/static/vendor"
TESTS = "tests/gateway/console/vendor"
PACKAGES = {
    "htmx.org@2.0.11": (
        "Thx/WtpeOQqSrqBCw/A1cwGJGg4UrVa3+sW0GmrM3p4gJgO89ecH4qtbnyzDDWFvBTqjnIMCgELTNt636dtamA==",
        {
            "dist/htmx.min.js": (
                f"{VENDOR}/htmx.min.js",
                "d6fdc75f204e6bdefa99b69bf1e6d4ac69b8a364f77929f45c13476b4000f717",
            ),
            "LICENSE": (
                f"{VENDOR}/htmx.LICENSE.txt",
                "d3d2456f76414f2456104660ebd65aff1c04cd7966b942bdabd63f3cdb316a38",
            ),
        },
    ),
    "uplot@1.6.32": (
        "KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
        {
            "dist/uPlot.iife.min.js": (
                f"{VENDOR}/uPlot.iife.min.js",
                "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
            ),
            "dist/uPlot.min.css": (
                f"{VENDOR}/uPlot.min.css",
                "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
            ),
            "LICENSE": (
                f"{VENDOR}/uPlot.LICENSE.txt",
                "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
            ),
        },
    ),
    "axe-core@4.14.1": (
        "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==",
        {
            "axe.min.js": (
                f"{TESTS}/axe.min.js",
                "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c",
            ),
            "LICENSE": (
                f"{TESTS}/axe.LICENSE.txt",
                "af175b9d96ee93c21a036152e1b905b0b95304d4ae8c2c921c7609100ba8df7e",
            ),
        },
    ),
}
"""By name and release: the SHA-512 of the package, as npm states it, and its files: by their name
in it, their place here and their SHA-256."""


def main() -> None:
    for package, (integrity, files) in PACKAGES.items():
        with tempfile.TemporaryDirectory() as folder:
            asked = ["npm", "pack", package, "--pack-destination", folder]
            subprocess.run(asked, check=True)
            [packed] = Path(folder).glob("*.tgz")
            content = packed.read_bytes()
        found = base64.b64encode(hashlib.sha512(content).digest()).decode()
        if found != integrity:
            raise SystemExit(f"{package} has the SHA-512 {found}")
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for name, (place, _) in files.items():
                file = archive.extractfile(f"package/{name}")
                assert file is not None, name
                (ROOT / place).parent.mkdir(parents=True, exist_ok=True)
                (ROOT / place).write_bytes(file.read())
    if broken := list(changed_files()):
        raise SystemExit(f"not as expected: {', '.join(broken)}")


def changed_files() -> Iterator[str]:
    """Yield the files that are not those of the releases."""
    for _, files in PACKAGES.values():
        for place, known in files.values():
            if hashlib.sha256((ROOT / place).read_bytes()).hexdigest() != known:
                yield place


if __name__ == "__main__":
    main()
