"""Install Tollgate into a virtual environment: `python install.py VENV [--torch | --dev]`.

`--torch`: PyTorch alone; `--dev`: the tools of tests, into an environment that has the rest. A line
names each stage with its size, and then how long it took. uv downloads and unpacks side by side and
checks the hashes of the locks; its cache is kept for the next time. Standard library only.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
REFUSED = 3
"""The exit status where the CPU build of PyTorch cannot be had and nobody allowed the large one."""
LOCKED = ("--require-hashes", "--no-deps")
FROM_PIP = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
}
"""The variables in which uv takes what pip's configuration says under these names."""


def main(venv: Path, *options: str) -> int:
    sizes = json.loads((HERE / "sizes.json").read_text())
    try:
        if "--dev" in options:
            install_tools(Uv(venv), sizes)
        elif "--torch" in options:
            make_environment(venv, sizes, stages=2)
        else:
            install_runtime(make_environment(venv, sizes, stages=4), sizes)
    except subprocess.CalledProcessError as error:
        print((error.stderr or "").rstrip() or f"{error.cmd[0]} failed", file=sys.stderr)
        return error.returncode or 1
    except LookupError as error:
        print(error.args[0], file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("Stopped; the same command goes on.", file=sys.stderr)
        return 130
    return 0


def make_environment(venv: Path, sizes: dict[str, int], stages: int) -> Uv:
    """Make the environment with uv and PyTorch in it, the first two of all stages.

    Raises: subprocess.CalledProcessError; LookupError where somebody has to choose a build.
    """
    python = venv / "bin" / "python"
    with Stage(f"1/{stages} Python environment with uv", sizes["uv"]):
        if not (venv / "bin" / "pip").exists():  # pip comes last: without it, it is half made
            run([sys.executable, str(HERE / "make_venv.py"), str(venv)])
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
        run([*pip, "install", "-q", "--require-hashes", "-r", str(HERE / "uv.txt")])
    uv = Uv(venv)
    install_torch(uv, sizes, stages, has_gpu(), os.environ.get("ALLOW_CUDA", ""))
    return uv


def install_runtime(uv: Uv, sizes: dict[str, int]) -> None:
    """Raises: subprocess.CalledProcessError."""
    with Stage("3/4 What Tollgate needs", sizes["runtime"]):
        uv.install(*LOCKED, "-r", str(HERE / "runtime.lock"))
    with Stage("4/4 Tollgate"):
        uv.install("--no-deps", "--no-build-isolation", "-e", str(ROOT))


def install_tools(uv: Uv, sizes: dict[str, int]) -> None:
    """Raises: subprocess.CalledProcessError."""
    with Stage("1/1 Tools for tests", sizes["dev"]):
        uv.install(*LOCKED, "-r", str(HERE / "dev.lock"))
        uv.install(*LOCKED, "-r", str(HERE / "without_deps.txt"))


def install_torch(uv: Uv, sizes: dict[str, int], stages: int, gpu: bool, allow_cuda: str) -> None:
    """Install the CPU build, or the one for CUDA where there is a GPU or `allow_cuda` is "1".

    The CPU build comes from the configured indexes, else from PyTorch's own, which uv knows.
    Raises: LookupError if neither has it; subprocess.CalledProcessError.
    """
    torch = (HERE / "torch.txt").read_text().strip()
    if allow_cuda == "1" or (gpu and allow_cuda != "0"):
        with Stage(f"2/{stages} PyTorch for CUDA", sizes["torch_cuda"]):
            uv.install(torch)
        return
    with Stage(f"2/{stages} PyTorch for CPU", sizes["torch_cpu"]):
        if sys.platform != "linux":  # what every index has is the CPU build there
            uv.install("--no-deps", torch)
            return
        try:
            uv.install("--no-deps", f"{torch}+cpu")
        except subprocess.CalledProcessError:
            try:
                uv.install("--no-deps", "--torch-backend", "cpu", f"{torch}+cpu")
            except subprocess.CalledProcessError as error:
                raise LookupError(question(torch, sizes, error.stderr)) from None


def question(torch: str, sizes: dict[str, int], reason: str) -> str:
    large = in_words(sizes["torch_cuda"])
    return (
        f"{reason.rstrip()}\n\n"
        f"The CPU build of {torch} ({in_words(sizes['torch_cpu'])}) can be had neither from the "
        "configured package indexes\nnor from PyTorch's own. Nothing larger is taken unasked. "
        "Choose:\n"
        f"  ALLOW_CUDA=1 make run             takes the CUDA build instead: {large}\n"
        "  PIP_FIND_LINKS=FOLDER make run    takes the CPU build from a folder with its wheel"
    )


class Uv:
    """Runs the uv of an environment, with what pip's configuration says about indexes."""

    def __init__(self, venv: Path) -> None:
        self.python = venv / "bin" / "python"
        listed = run([str(self.python), "-m", "pip", "config", "list"])
        self.environment, self.options = from_pip(listed)

    def install(self, *arguments: str) -> None:
        """Raises: subprocess.CalledProcessError, with what uv said."""
        uv = [str(self.python.with_name("uv")), "pip", "install", "-q"]
        given = {name: value for name, value in self.environment.items() if name not in os.environ}
        command = [*uv, "--python", str(self.python), *self.options, *arguments]
        run(command, {**os.environ, **given})


def from_pip(listed: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables and the options for uv that say what `pip config list` printed."""
    found: dict[str, str] = {}
    for section in ("global", "install", ":env:"):  # a later one wins
        for line in listed.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(f"{section}."):
                found[key[len(section) + 1 :]] = str(ast.literal_eval(value))
    environment = {
        variable: " ".join(found[name].split())
        for name, variable in FROM_PIP.items()
        if found.get(name)
    }
    if "UV_INDEX" in environment:
        # pip looks through all indexes, uv through the first that has the name. The hashes of the
        # locks say which file is meant.
        environment["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    # A folder that is not there is an error for uv, a warning for pip.
    links = found.get("find-links", "").split()
    places = [each for each in links if "://" in each or Path(each).exists()]
    options = [word for place in places for word in ("--find-links", place)]
    if found.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        options.append("--no-index")
    return environment, options


class Stage:
    """Says what is being done, on a terminal for how long already, and then how long it took."""

    def __init__(self, name: str, megabytes: int | None = None) -> None:
        self._said = name if megabytes is None else f"{name}, {in_words(megabytes)}"
        self._ended = threading.Event()
        self._ticking = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> None:
        self._started = time.monotonic()
        print(f"{self._said} ... ", end="", flush=True)
        if sys.stdout.isatty():
            self._ticking.start()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        seconds = time.monotonic() - self._started
        if self._ticking.ident is not None:
            self._ended.set()
            self._ticking.join()
            print(f"\r{self._said} ... ", end="")
        ends = {None: f"{seconds:.1f} s", KeyboardInterrupt: "stopped"}
        print(ends.get(kind, "failed"), flush=True)

    def _tick(self) -> None:
        while not self._ended.wait(1.0):
            seconds = time.monotonic() - self._started
            print(f"\r{self._said} ... {seconds:.0f} s", end="", flush=True)


def run(command: list[str], environment: dict[str, str] | None = None) -> str:
    """Return what it printed. Raises: subprocess.CalledProcessError, with what it said."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def has_gpu() -> bool:
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    return subprocess.run([program, "-L"], capture_output=True, check=False).returncode == 0


def in_words(megabytes: int) -> str:
    return f"{megabytes} MB" if megabytes < 1000 else f"{megabytes / 1000:.1f} GB"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute(), *sys.argv[2:]))
