"""Fetch the files of swagger-ui, by which `/docs` shows the API: `python swagger_ui.py`.

They stand in the repository, so that the page asks no other site. To take another release, change
`VERSION` and both sums (`npm view swagger-ui-dist@VERSION dist.integrity`), and look at the page.
"""

from __future__ import annotations

import base64
import hashlib
import io
import subprocess
import tarfile
import tempfile
from pathlib import Path

VERSION = "5.35.0"
INTEGRITY = (
    "U06rpMtW9V3XPGOBeamTUSr0Z09jMX4IJuANpE/EZbAhw0G8CgwrzU4YmXkn/h0wCDNsXdGarTNNHC3sU8yVUQ=="
)
"""The SHA-512 of the package, as the registry of npm states it."""
FOLDER = Path(__file__).resolve().parents[1] / "gateway/console/static/swagger"
FILES = {
    "swagger-ui-bundle.js": (
        "swagger-ui-bundle.js",
        "e6a898692f2d768e807c3ba4626068a69a2c5dd960dd6c76f3e4d3a3de180af2",
    ),
    "swagger-ui.css": (
        "swagger-ui.css",
        "5ed08757e53da3e026d6cbecc61fe5d43585c9560b302d534ad56692519a273d",
    ),
    "LICENSE": (
        "LICENSE.txt",
        "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30",
    ),
    "NOTICE": (
        "NOTICE.txt",
        "0d20d1adef18aee3f40dd258172155521ce702ac445cb5f7b7d60ed32dad2fb2",
    ),
    "swagger-ui-bundle.js.LICENSE.txt": (
        "swagger-ui-bundle.js.LICENSE.txt",
        "37eb6e7e59aed57b2c1acf076574b818ea07b74265717e0bd67b59e0baf9abbb",
    ),
}
"""By their name in the package: their name here, and their SHA-256."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        asked = ["npm", "pack", f"swagger-ui-dist@{VERSION}", "--pack-destination", folder]
        subprocess.run(asked, check=True)
        [package] = Path(folder).glob("*.tgz")
        content = package.read_bytes()
    if (found := base64.b64encode(hashlib.sha512(content).digest()).decode()) != INTEGRITY:
        raise SystemExit(f"swagger-ui-dist {VERSION} has the SHA-512 {found}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for name, (kept, _) in FILES.items():
            file = archive.extractfile(f"package/{name}")
            assert file is not None, name
            (FOLDER / kept).write_bytes(file.read())
    if broken := changed_files():
        raise SystemExit(f"not as expected: {', '.join(broken)}")


def changed_files() -> list[str]:
    """Return the files that are not those of the release."""
    kept = [(FOLDER / name, known) for name, known in FILES.values()]
    return [
        path.name for path, known in kept if hashlib.sha256(path.read_bytes()).hexdigest() != known
    ]


if __name__ == "__main__":
    main()
