"""Downloads weights from a hub into its cache; what was interrupted goes on where it stopped.

The hub's library keeps nothing of a file that did not come whole. Here the part that has come stays
in the cache as `blobs/<etag>.part`, until the file is whole and takes its name, `blobs/<etag>`.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple

log = logging.getLogger(__name__)

AT_ONCE = 4
"""Files that are downloaded side by side."""
TELL_EVERY_S = 0.25
RATE_OVER_S = 10.0
"""The rate is of so many last seconds."""
SHA256 = re.compile(r"[0-9a-f]{64}")
"""The ETag of a large file is the hash of its content."""
MEGABYTE = 1_000_000
PIECE_BYTES = 1 << 20
MAX_ATTEMPTS = 5
RETRY_AFTER_S = 1.0


class Transfer(NamedTuple):
    """How far a download is. In bytes, and bytes a second."""

    done: int
    total: int
    rate: float

    @property
    def left_s(self) -> float | None:
        """Return how many seconds it will take at this rate; None: nothing comes."""
        return (self.total - self.done) / self.rate if self.rate > 0 else None

    def text(self) -> str:
        """Return its rate and the time that is left, for a person."""
        left = self.left_s
        if left is None:
            return "waits for the hub"
        minutes, seconds = divmod(round(left), 60)
        time_left = f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
        return f"{self.rate / MEGABYTE:.1f} MB/s, {time_left} left"


Tell = Callable[[Transfer], None]


class TransferMeter:
    """Counts bytes as they come, from any thread, and tells of them a few times a second."""

    def __init__(self, total: int, tell: Tell, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._tell, self._clock = total, tell, clock
        self._done = 0
        self._samples: deque[tuple[float, int]] = deque([(clock(), 0)])
        self._lock = threading.Lock()
        self._is_stopped = False

    def have(self, size: int) -> None:
        """Count what is there already: it is no part of the rate. Less than 0: it is gone."""
        with self._lock:
            self._done += size
            self._samples = deque((at, before + size) for at, before in self._samples)

    def stop(self) -> None:
        """Make each thread that counts end with an OSError."""
        self._is_stopped = True

    def add(self, size: int) -> None:
        """Raises: OSError once it is stopped."""
        if self._is_stopped:
            raise OSError("the download was interrupted")
        with self._lock:
            self._done += size
            now = self._clock()
            last, _ = self._samples[-1]
            if now - last < TELL_EVERY_S and self._done < self._total:
                return
            self._samples.append((now, self._done))
            while len(self._samples) > 2 and now - self._samples[0][0] > RATE_OVER_S:
                self._samples.popleft()
            began, before = self._samples[0]
            rate = max(self._done - before, 0) / max(now - began, 1e-3)
            self._tell(Transfer(self._done, self._total, rate))


def download(name: str, commit: str, sizes: Mapping[str, int], tell: Tell) -> None:
    """Bring files of a repository into the hub's cache, as far as they are not there. `sizes`: of
    each file, in bytes. `tell` is called by any thread.

    Raises: what the hub's library raises, OSError.
    """
    meter = TransferMeter(sum(sizes.values()), tell)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        begun = [pool.submit(_download, name, commit, file, sizes[file], meter) for file in sizes]
        try:
            for each in begun:
                each.result()
        except BaseException:
            meter.stop()
            for each in begun:
                each.cancel()
            raise


def _download(name: str, commit: str, file: str, size: int, meter: TransferMeter) -> None:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import repo_folder_name

    url = hf_hub_url(name, file, revision=commit)
    etag = get_hf_file_metadata(url).etag
    if etag is None or size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        return  # the library has another way to it
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
    blob = folder / "blobs" / etag
    blob.parent.mkdir(parents=True, exist_ok=True)
    part = blob.with_name(f"{etag}.part")
    with part.open("ab") as out:
        fcntl.flock(out, fcntl.LOCK_EX)  # another process may bring the same file
        if blob.exists():
            meter.have(size)
            part.unlink(missing_ok=True)
            return
        before = out.tell()
        meter.have(before)
        _receive(url, out, size, meter)
        out.flush()
        if before and SHA256.fullmatch(etag) and _sha256(part) != etag:
            part.unlink()
            raise OSError(f"{file}: what came of it is damaged; start again")
        part.rename(blob)


def _receive(url: str, out: IO[bytes], size: int, meter: TransferMeter) -> None:
    """Append to `out` what it lacks of `size` bytes; a connection that breaks is made again, until
    nothing comes several times. Raises: what the hub's library raises, OSError."""
    import httpx2
    from huggingface_hub import constants
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # it exports them by a star
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    headers = {**build_hf_headers(), "accept-encoding": "identity"}
    attempts = 0
    while (have := out.tell()) < size:
        ranged = {**headers, "range": f"bytes={have}-"} if have else headers
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        try:
            with get_session().stream("GET", url, headers=ranged, timeout=timeout) as answer:
                hf_raise_for_status(answer)
                if have and answer.status_code != httpx2.codes.PARTIAL_CONTENT:
                    out.truncate(0)
                    meter.have(-have)
                for piece in answer.iter_bytes(PIECE_BYTES):
                    out.write(piece)
                    meter.add(len(piece))
                    attempts = 0
        except httpx2.TransportError as error:
            attempts += 1
            if attempts > MAX_ATTEMPTS:
                raise
            log.info("%s: %s; the download goes on", url, error or type(error).__name__)
            time.sleep(RETRY_AFTER_S)
    if have != size:
        raise OSError(f"{url}: {have} bytes came, not {size}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
