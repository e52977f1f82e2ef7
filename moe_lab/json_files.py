"""Write JSON files atomically, read JSON files and check their shape, and cache results of batches
in files.

The documents of a store are sealed: the last key of a document has the sha256 of the text before
it, by which readers notice any changed byte.
"""

from __future__ import annotations

import errno
import json
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

Number = int | float
Document = dict[str, Any]
"""A JSON object: key -> value."""
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


class Damaged(ValueError):
    """A file does not contain the expected document."""


def canonical(document: Any) -> str:
    """JSON text that is equal for equal documents: sorted keys, no spaces, no NaN."""
    return _ENCODER.encode(document)


def digest(document: Any) -> str:
    """sha256 of the canonical JSON of `document`, in hexadecimal."""
    return sha256(canonical(document).encode()).hexdigest()


def write_json(path: Path, document: Any) -> None:
    """Write a document as indented JSON, atomically."""
    write_text(path, json.dumps(document, indent=1, sort_keys=True) + "\n")


def write_text(path: Path, text: str, mode: int | None = None) -> None:
    """Write a file atomically: a reader sees the whole old file or the whole new file. `mode`:
    permissions of the file; None: those of the umask."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        temporary.write_text(text, encoding="utf-8")
        if mode is not None:
            temporary.chmod(mode)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path, shape: Any) -> Any:
    """The document in a file. Raises Damaged unless the document fits `shape` (see `fits`)."""
    return parse(content_of(path), shape, str(path))


def content_of(path: Path) -> bytes:
    """The content of a file. Raises Damaged if there is a folder instead, and FileNotFoundError if
    the file is missing, or another machine removed it during the reading (ESTALE)."""
    try:
        with path.open("rb", buffering=0) as file:  # fewer system calls than with a buffer
            return file.read()
    except NotADirectoryError:
        raise FileNotFoundError(path) from None
    except IsADirectoryError:
        raise Damaged(f"{path} is damaged") from None
    except OSError as error:
        if error.errno == errno.ESTALE:
            raise FileNotFoundError(path) from None
        raise


def parse(content: bytes, shape: Any, name: str) -> Any:
    """The document in `content`. Raises Damaged unless the document fits `shape` (see `fits`).
    `name`: the name of the file, for messages."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):  # ValueError: not JSON, or not UTF-8
        raise Damaged(f"{name} is damaged") from None
    if not fits(document, shape):
        raise Damaged(f"{name} is damaged")
    return document


DIGEST = ',"digest":"'
"""Text before the sha256 in a sealed document."""


def sealed(text: str) -> str:
    """`text`, the JSON text of an object that is not empty, with a last key "digest": the sha256 of
    `text`."""
    # the closing brace of `text` moves behind the digest
    return f'{text[:-1]}{DIGEST}{sha256(text.encode()).hexdigest()}"}}'


def write_sealed(
    path: Path, document: Document, indent: int | None = None, mode: int | None = None
) -> None:
    """Write a document as JSON with its digest (see `sealed`), atomically. `mode`: as in
    `write_text`."""
    text = json.dumps(
        document, indent=indent, separators=(",", ": "), sort_keys=True, allow_nan=False
    )
    write_text(path, sealed(text), mode)


def read_sealed(path: Path) -> Document:
    """The sealed document in a file, without its digest. Raises Damaged unless the digest is
    right."""
    return parse_sealed(content_of(path), str(path))


def parse_sealed(content: bytes, name: str) -> Document:
    """The sealed document in `content`, without its digest. Raises Damaged unless the digest is
    right. `name`: name of the file, for messages."""
    text, separator, ending = content.rpartition(DIGEST.encode())
    if not separator:
        raise Damaged(f"{name} is damaged, or of an older moe_lab: it has no digest")
    text += b"}"  # the document without its digest
    if ending != f'{sha256(text).hexdigest()}"}}'.encode():
        raise Damaged(f"{name} is damaged")
    document: Document = json.loads(text)
    return document


def fits(document: Any, shape: Any) -> bool:
    """Whether a JSON document has a shape. Shapes, and the documents that have them:

    {"a": int, "b": str | None}   an object whose value under a is an integer, and whose value under
                                  b is a string, null or missing
    {str: int}                    an object with any keys, whose values are integers
    [int]                         a list of any number of integers
    (int, str)                    a list of an integer and a string

    True and False have the shape bool, but not the shape int.
    """
    if isinstance(shape, Mapping):
        if not isinstance(document, dict):
            return False
        if str in shape:
            return all(fits(value, shape[str]) for value in document.values())
        return all(fits(document.get(key), inner) for key, inner in shape.items())
    if isinstance(shape, list):
        return isinstance(document, list) and all(fits(item, shape[0]) for item in document)
    if isinstance(shape, tuple):
        same_length = isinstance(document, list) and len(document) == len(shape)
        return same_length and all(
            fits(item, inner) for item, inner in zip(document, shape, strict=True)
        )
    # in Python, True and False are instances of int
    return isinstance(document, shape) and (shape is bool or not isinstance(document, bool))


class ResultCache:
    """Cache of the results of batches. Each result is appended to a file as soon as it is computed,
    as a line that is a sealed document: the hash of the batch, and the result.

    If a process is killed, the next process reads the results from the file. The division into
    batches does not depend on the file, so results have the same bits whether a process was killed
    or not."""

    def __init__(self, file: Path | None = None) -> None:
        """If `file` is None, results are only kept in memory."""
        self.file = file
        self._results: dict[str, list[Any]] = {}
        if file is None or not file.exists():
            return
        for line in file.read_bytes().splitlines():
            with suppress(Damaged):  # a killed process may have left an incomplete line
                document = parse_sealed(line, str(file))
                self._results[document["batch"]] = document["result"]

    def result(self, batch: Any, compute: Callable[[], list[Any]]) -> list[Any]:
        """The result of `batch`, from the cache or else from `compute`. The batch and the result
        must be JSON documents."""
        key = sha256(json.dumps(batch).encode()).hexdigest()
        if key not in self._results:
            self._results[key] = compute()
            if self.file:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                line = sealed(json.dumps({"batch": key, "result": self._results[key]}))
                # the first newline ends the last line, in case that line is incomplete
                with self.file.open("a", encoding="utf-8") as lines:
                    lines.write(f"\n{line}\n")
        return self._results[key]
