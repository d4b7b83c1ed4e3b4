"""Looks over a model's folder before anything is loaded from it: what is missing, broken or of a
kind that is not read is told in a moment, with what to do about it.

Reads heads, not weights, and needs no torch. Whoever loads a file checks it in full.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.errors import ConfigError
from engine.text.hub import INDEX_FILE, SINGLE_FILE

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
OTHER_WEIGHTS = ("pytorch_model*.bin", "*.pth", "*.pt", "*.gguf", "*.h5", "*.onnx", "*.npz")
SENTENCEPIECE = ("tokenizer.model", "*.spm", "spiece.model")
LENGTH_BYTES = 8
"""A safetensors file begins with its header's length, little-endian; JSON and the data follow."""
MAX_HEADER_BYTES = 100_000_000
"""The format allows no longer header."""
MAX_TEXT_BYTES = 256 * 1024 * 1024
MAX_NAME_CHARS = 255
LFS_POINTER = b"version https://git-lfs"


def has_tokenizer(folder: Path) -> bool:
    return (folder / TOKENIZER).exists()


def check_model_folder(folder: Path, *, weights: bool = True) -> None:
    """Raises: ConfigError, one line that names the file. weights: False looks at no weights. A
    missing tokenizer is left to who needs it (`check_tokenizer`)."""
    check_folder(folder)
    if "architectures" not in read_json(folder / CONFIG):
        raise ConfigError(f"{folder / CONFIG} has no field 'architectures': it is no model's")
    if has_tokenizer(folder):
        check_tokenizer(folder)
    if weights:
        check_weights(folder)


def check_folder(folder: Path) -> None:
    what = "give the folder of a model in Hugging Face's form, or org/name to fetch one"
    try:
        if not folder.exists():
            raise ConfigError(f"{folder} does not exist: {what}")
        if not folder.is_dir():
            raise ConfigError(f"{folder} is a file: {what}")
        names = [each.name for each in folder.iterdir()]
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}") from error
    if CONFIG not in names:
        raise ConfigError(f"{folder} has no {CONFIG}: {what}")


def check_tokenizer(folder: Path) -> None:
    """Raises: ConfigError."""
    path = folder / TOKENIZER
    if not has_tokenizer(folder):
        found = first(folder, SENTENCEPIECE)
        but = "" if found is None else f" ({found} is not read)"
        how = "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...) saves one"
        raise ConfigError(f"{folder} has no {TOKENIZER}{but}: {how}")
    if "model" not in read_json(path):
        raise ConfigError(f"{path} is no tokenizer: it has no field 'model'")


def check_weights(folder: Path) -> None:
    index = folder / INDEX_FILE
    if not index.exists():
        if not (folder / SINGLE_FILE).exists():
            raise ConfigError(without_weights(folder))
        check_safetensors(folder / SINGLE_FILE)
        return
    try:
        located = msgspec.json.decode(read_json(index)["weight_map"], type=dict[str, str])
    except (KeyError, msgspec.MsgspecError):
        raise ConfigError(f"{index} has no 'weight_map' from tensors to files") from None
    files = sorted(set(located.values()))
    if long := next((file for file in files if len(file) > MAX_NAME_CHARS), None):
        raise ConfigError(f"{index} names a file of {len(long)} characters")
    missing = [file for file in files if not (folder / file).exists()]
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ConfigError(
            f"{folder} lacks {len(missing)} of the {len(files)} files that {INDEX_FILE} names"
            f" ({shown}): download it again"
        )
    for file in files:
        check_safetensors(folder / file)


def without_weights(folder: Path) -> str:
    found = first(folder, OTHER_WEIGHTS)
    if found is None:
        return f"{folder} has no weights ({SINGLE_FILE} or {INDEX_FILE}): download it again"
    how = "transformers' AutoModel.from_pretrained(...).save_pretrained(...) saves them so"
    return f"{folder} has its weights as {found} alone; only safetensors are read: {how}"


def first(folder: Path, patterns: tuple[str, ...]) -> str | None:
    """Return the name of a file that matches one of the patterns, if there is one."""
    found = (path.name for pattern in patterns for path in sorted(folder.glob(pattern)))
    return next(found, None)


def check_safetensors(path: Path) -> None:
    """Check that the file is as long as its header says. Raises: ConfigError."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            begin = file.read(LENGTH_BYTES)
            length = int.from_bytes(begin, "little")
            if length > MAX_HEADER_BYTES or len(begin) < LENGTH_BYTES:
                rest = begin + file.read(len(LFS_POINTER))
                raise ConfigError(not_safetensors(path, rest, size))
            header = file.read(length)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if len(header) < length:
        raise ConfigError(f"{path} is cut off in its header: download it again")
    try:
        entries = msgspec.json.decode(header, type=dict[str, HeaderEntry])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a safetensors file: {error}") from error
    end = max((each.data_offsets[1] for each in entries.values()), default=0)
    if size < (whole := LENGTH_BYTES + length + end):
        raise ConfigError(f"{path} is cut off: it has {size} of {whole} bytes; download it again")


class HeaderEntry(msgspec.Struct):
    """Says where a tensor of a header lies; the metadata lie nowhere."""

    data_offsets: tuple[int, int] = (0, 0)


def not_safetensors(path: Path, begin: bytes, size: int) -> str:
    if begin.startswith(LFS_POINTER):
        return f"{path} is a pointer of Git LFS, not the file: run `git lfs pull` in its folder"
    return f"{path} is not a safetensors file ({size} bytes)"


def read_json(path: Path) -> dict[str, msgspec.Raw]:
    """Read a JSON object, whose values are checked and not decoded: a tokenizer's are large."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_TEXT_BYTES:
        raise ConfigError(f"{path} has more than {MAX_TEXT_BYTES} bytes")
    if data.startswith(LFS_POINTER):
        raise ConfigError(not_safetensors(path, data, len(data)))
    try:
        return msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a JSON object: {error}") from error
