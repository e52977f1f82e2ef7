"""Read documents from a text file, from a file with JSON lines or a JSON list, or from a data set
on the hub. Files may be gzipped.

Nothing is unpickled. This module needs neither torch nor transformers.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from moe_lab.calibration.documents import BLANK_LINE, Document, Text, document, has_answer, is_empty
from moe_lab.config import CalibrationConfig
from moe_lab.errors import UserError, nearest
from moe_lab.paths import local_path

TEXT_SUFFIXES = (".txt", ".md")
JSON_SUFFIXES = (".jsonl", ".json")
PICKLE_SUFFIXES = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".npy", ".npz")
UNREADABLE_SUFFIXES = (
    *PICKLE_SUFFIXES,
    ".arrow",
    ".parquet",
    ".csv",
    ".tsv",
    ".zip",
    ".zst",
    ".gz",
)
ANSWER_FIELDS = (
    "instruction and output, question and answer, prompt and completion, or messages of an "
    "assistant"
)
HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
FILE_PREFIX = "hf://datasets/"
"""Prefix of paths that name a single file on the hub: hf://datasets/OWNER/NAME/FILE."""


def read(settings: CalibrationConfig) -> list[Document]:
    """All documents of the source that are not empty. With calibration.joined, they are joined into
    a single document. UserError when all documents are empty."""
    file = local_file(settings.path)
    if file is None and not is_hub_file(settings.path):  # the source is a data set on the hub
        documents = _documents(hub_rows(settings), settings)
    else:  # a local file, or one file on the hub
        documents = _read_file(file or download_file(settings.path), settings)
    if settings.joined:
        documents = [_join(documents, settings)]
    non_empty_documents = [document for document in documents if not is_empty(document)]
    if not non_empty_documents:
        raise UserError(
            f"calibration.path={settings.path} holds no document: expected text to calibrate on"
        )
    return non_empty_documents


def _join(documents: list[Document], settings: CalibrationConfig) -> Document:
    """One plain text: all documents, also empty documents, with blank lines between them."""
    texts = [document.text for document in documents if isinstance(document, Text)]
    if len(texts) < len(documents):
        raise UserError(
            f"calibration.joined=true: {settings.path} holds more than plain texts: expected a "
            "field of text"
        )
    return Text(BLANK_LINE.join(texts))


def read_answered(settings: CalibrationConfig) -> list[Document]:
    """The documents that `read` returns. UserError if no document has an answer."""
    documents = read(settings)
    if not any(has_answer(document) for document in documents):
        raise UserError(
            f"calibration.path={settings.path} holds no answers: expected the fields "
            f"{ANSWER_FIELDS}"
        )
    return documents


def check_answers(settings: CalibrationConfig) -> None:
    """Raise UserError when the source is a local file and none of its documents has an answer."""
    if local_file(settings.path) is not None:
        read_answered(settings)


def local_file(path: str) -> Path | None:
    """The local file that `path` names. None if `path` names a data set or a file on the hub.
    UserError if there is no such file, or if it is a folder, is empty, or has an unsupported
    format."""
    if is_hub_file(path):
        file_format(path, Path(path))  # raises UserError for an unsupported format
        return None
    file = local_path(path)
    if file.is_dir():
        raise UserError(
            f"calibration.path={path} is a folder: expected a file such as {file.name}/train.jsonl"
        )
    if not file.exists():
        if _may_be_hub_id(path):
            return None
        raise _missing_error(path, file)
    file_format(path, file)
    if file.stat().st_size == 0:
        raise UserError(f"calibration.path={path} is empty: expected text to calibrate on")
    return file


def _may_be_hub_id(path: str) -> bool:
    """Whether `path` may be the id of a data set on the hub: NAME or OWNER/NAME. False if `path`
    seems to be a mistyped path of a local file."""
    parent = Path(path).parent
    folder_exists = parent != Path(".") and parent.is_dir()
    looks_like_file = Path(path).suffix in TEXT_SUFFIXES + JSON_SUFFIXES + UNREADABLE_SUFFIXES
    return HUB_ID.fullmatch(path) is not None and not looks_like_file and not folder_exists


def _missing_error(path: str, file: Path) -> UserError:
    """The error for a `file` that does not exist. `path`: the file as the user typed it."""
    if not file.parent.is_dir():
        return UserError(
            f"calibration.path={path} does not exist: there is no folder {file.parent}"
        )
    nearest_name = nearest(file.name, (neighbour.name for neighbour in file.parent.iterdir()))
    hint = (
        f"did you mean {file.parent / nearest_name}?"
        if nearest_name
        else "expected a text or JSON lines file, or a hub id"
    )
    return UserError(f"calibration.path={path} does not exist: {hint}")


def file_format(path: str, file: Path, setting: str = "calibration.path") -> str:
    """Format of `file` by its suffix, ignoring .gz: "document" (the whole file is one document) or
    "json" (each record is one document). UserError for any other suffix. `setting`, `path`: name
    and value of the setting that names the file."""
    suffix = Path(file.stem).suffix if file.suffix == ".gz" else file.suffix
    if suffix in TEXT_SUFFIXES:
        return "document"
    if suffix in JSON_SUFFIXES:
        return "json"
    reason = (
        "pickles run code when read, so they never are"
        if suffix in PICKLE_SUFFIXES
        else "this format is not read"
    )
    formats = ", ".join(TEXT_SUFFIXES + JSON_SUFFIXES)
    ending = "".join(file.suffixes[-2:]) if file.suffix == ".gz" else file.suffix
    raise UserError(
        f"{setting}={path} ends in {ending or 'no suffix'}: {reason}; expected {formats}, or one "
        "of them with .gz"
    )


def _read_file(file: Path, settings: CalibrationConfig) -> list[Document]:
    """The documents of a file. With calibration.joined, each line of a text file is a document."""
    if file_format(str(file), file) == "json":
        return _documents(read_records(file, "calibration.path"), settings)
    text = read_text_file(file, "calibration.path").replace("\r\n", "\n")
    return [Text(part) for part in (wikitext_lines(text) if settings.joined else [text])]


def _documents(records: Iterable[tuple[str, Any]], settings: CalibrationConfig) -> list[Document]:
    """`records`: pairs (location, record)."""
    return [
        document(record, settings.field, location, settings.template, settings.ignored)
        for location, record in records
    ]


def wikitext_lines(text: str) -> list[str]:
    """The lines of a text, in the form that rows of WikiText have on the hub. A blank line is "".
    Any other line ends with a line feed."""
    rows = text.removesuffix("\n").split("\n") if text else []
    return [f"{row}\n" if row.strip() else "" for row in rows]


def first_record(settings: CalibrationConfig) -> list[Document]:
    """A list with one document, from the first record of a local JSON file. [] for other
    sources."""
    file = local_file(settings.path)
    if file is None:
        return []
    if file_format(settings.path, file) == "json":
        return _documents(islice(read_records(file, "calibration.path"), 1), settings)
    read_text_file(file, "calibration.path")  # raises UserError for a file that is no text
    return []


def read_as_one_text(file: Path, setting: str) -> str:
    """The content of a text file, with Unix line ends. For a JSON file, the texts of all records,
    joined by blank lines. `setting`: name of the setting that names the file. UserError for a
    conversation that only a chat template can turn into text."""
    if file_format(str(file), file, setting) == "document":
        return read_text_file(file, setting).replace("\r\n", "\n")
    records = read_records(file, setting)
    documents = [document(record, None, location) for location, record in records]
    return joined_texts(documents, f"{setting}={file}")


def joined_texts(documents: Sequence[Document], source: str) -> str:
    """The texts of the documents, joined by blank lines. `source`: setting and value that name the
    set. UserError for a conversation that only a chat template can turn into text."""
    texts = [document.plain.text for document in documents if document.plain]
    if len(texts) < len(documents):
        raise UserError(
            f"{source} holds conversations: expected a file of texts, which are read as they stand"
        )
    return BLANK_LINE.join(texts)


def read_text_file(file: Path, setting: str) -> str:
    """The content of a UTF-8 text file, which may be gzipped. `setting`: name of the setting that
    names the file. UserError for a file that cannot be read or is not UTF-8."""
    try:
        raw = file.read_bytes()
        if file.suffix == ".gz":
            raw = gzip.decompress(raw)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{setting}={file} is a damaged gz file: {error}") from error
    except OSError as error:
        raise UserError(f"{setting}={file} cannot be read: {error.strerror}") from error
    try:
        text = raw.decode("utf-8-sig")
        # a zero byte is a sign of UTF-16 or of a binary format
        position = raw.find(0)
    except UnicodeDecodeError as error:
        position = error.start
    if position >= 0:
        line = raw.count(b"\n", 0, position) + 1
        raise UserError(
            f"{setting}={file} is not UTF-8 text: line {line} has the byte {raw[position]:#04x} "
            f"(byte {position})"
        )
    return text


def read_records(file: Path, setting: str) -> Iterator[tuple[str, Any]]:
    """Yield (location, record) for each record of a file with a JSON list or JSON lines. The
    location is "FILE record NUMBER" in a list and "FILE line NUMBER" otherwise. `setting`: name of
    the setting that names the file. UserError for damaged JSON."""
    text = read_text_file(file, setting)
    start_line = 1
    try:
        if text.lstrip().startswith("["):
            yield from (
                (f"{file} record {number_in_list}", record)
                for number_in_list, record in enumerate(json.loads(text), start=1)
            )
            return
        # str.splitlines would also cut at separators that JSON strings may hold unescaped
        for start_line, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield f"{file} line {start_line}", json.loads(line)
    except (ValueError, RecursionError) as error:
        # damaged JSON, too long a number, or too deeply nested brackets
        # json.loads counts lineno from 1 at `start_line`
        line_of_error = start_line + getattr(error, "lineno", 1) - 1
        raise UserError(
            f"{file} line {line_of_error} is damaged JSON: {getattr(error, 'msg', error)}"
        ) from None


def is_hub_file(path: str) -> bool:
    """Whether `path` names one file of a data set on the hub."""
    return path.startswith(FILE_PREFIX)


def hub_file(path: str) -> tuple[str, str]:
    """(OWNER/NAME, FILE) of the path hf://datasets/OWNER/NAME/FILE. UserError when a part is
    missing."""
    parts = path.removeprefix(FILE_PREFIX).split("/", 2)
    if len(parts) < 3:
        raise UserError(
            f"calibration.path={path} is incomplete: expected {FILE_PREFIX}OWNER/NAME/FILE"
        )
    return f"{parts[0]}/{parts[1]}", parts[2]


def download_file(path: str) -> Path:
    """Download the file hf://datasets/OWNER/NAME/FILE, unless there is a local copy. Returns the
    local copy. UserError when the download fails."""
    from huggingface_hub import hf_hub_download

    name, file = hub_file(path)
    try:
        return Path(hf_hub_download(name, file, repo_type="dataset"))
    except (OSError, ValueError) as error:
        raise _unreachable_error(path, error) from error


def download(settings: CalibrationConfig) -> None:
    """Download the file or data set at `settings.path` if it is on the hub. UserError when the
    download fails."""
    if local_file(settings.path) is not None:
        return
    if is_hub_file(settings.path):
        download_file(settings.path)
    else:
        next(hub_rows(settings), None)  # the generator downloads before it yields the first row


def hub_rows(settings: CalibrationConfig) -> Iterator[tuple[str, Any]]:
    """Yield (location, record) for each row of a split of a data set on the hub. UserError when
    the split cannot be downloaded."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        split = load_dataset(settings.path, settings.subset, split=settings.split)
    except (OSError, ValueError, DatasetsError) as error:
        raise _unreachable_error(settings.path, error) from error
    for number, record in enumerate(split, start=1):
        yield f"{settings.path} row {number}", record


def _unreachable_error(path: str, error: Exception) -> UserError:
    """The error for a source that is no local file and could not be downloaded."""
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    return UserError(
        f"calibration.path={path} is no file here and could not be had from the hub ({reason}): "
        "expected a file, or a data set's id while the hub can be reached"
    )
