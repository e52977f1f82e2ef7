"""Where the documents of a calibration set come from: a file, a folder of files, or a data set or a
file on the hub.

A format of files is one function in `READERS`. Nothing is unpickled, and neither torch nor
transformers is imported.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from moe_lab.calibration.documents import BLANK_LINE, Document, Documents, Text, has_answer
from moe_lab.config import CalibrationConfig
from moe_lab.errors import UserError, nearest, reason_in
from moe_lab.paths import PREFIX, local_path

HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
HUB_FILE = re.compile(r"hf://datasets/([^/]+/[^/]+)/(.+)")
"""Path of a single file on the hub. Groups: OWNER/NAME, file."""
_SETTING = "calibration.path"


# A set.


def read(settings: CalibrationConfig) -> Documents:
    """The documents of a set. With calibration.joined, they are joined into a single document.
    UserError if no record has words."""
    documents = _documents(_rows(settings), settings)
    files = local_files(settings)
    for file in _visible_files(local_path(settings.path)):
        if file not in files:
            documents.left_out["a file of another kind"].append(str(file.path))
    if settings.joined:
        text = joined_texts(documents.documents, f"calibration.joined=true: {settings.path}")
        documents.documents = [Text(text)] if text.strip() else []
    _check_not_empty(documents)
    return documents


def _check_not_empty(documents: Documents) -> None:
    """Raise UserError, with the reasons, unless some record was a document."""
    if not documents.documents:
        reasons = [f"{reason}, {places[0]}" for reason, places in documents.left_out.items()]
        raise UserError(
            f"calibration.path={documents.settings.path} holds no document "
            f"({'; '.join(reasons) or 'it is empty'}): expected text to calibrate on"
        )


def check_answers(settings: CalibrationConfig) -> None:
    """Raise UserError when the source is local and none of its documents has an answer."""
    if local_files(settings) and not any(map(has_answer, read(settings).documents)):
        raise UserError(
            f"calibration.path={settings.path} holds no answers: expected tasks with answers, such "
            "as the fields question and answer, or messages of an assistant"
        )


def first_document(settings: CalibrationConfig) -> list[Document]:
    """A list with the first document of a local source; [] for a source on the hub. UserError if no
    record has words."""
    if not local_files(settings):
        return []
    if settings.joined:  # all records are one document
        return read(settings).documents
    documents = _documents(_rows(settings), settings, most=1)
    _check_not_empty(documents)
    return documents.documents


def _documents(rows: Rows, settings: CalibrationConfig, most: int | None = None) -> Documents:
    """The documents of the `rows`, or the first `most`."""
    documents = Documents(settings)
    for location, record in rows:
        documents.add(record, location)
        if len(documents.documents) == most:
            break
    return documents


def _rows(settings: CalibrationConfig) -> Rows:
    """Yield (location, record) for each record of a set. With calibration.joined, each line of a
    text is a record."""
    is_on_hub = HUB_FILE.fullmatch(settings.path)
    files = download(settings) if is_on_hub else local_files(settings)
    rows = chain.from_iterable(file.rows() for file in files) if files else hub_rows(settings)
    for location, record in rows:
        is_text = settings.joined and isinstance(record, str)
        for part in wikitext_lines(record) if is_text else [record]:
            yield location, part


def is_own_text(settings: CalibrationConfig) -> bool:
    """Whether the source is a file or a folder of the user, of which calibration.tokens may be more
    than there is. Sets that are published or shipped have at least calibration.tokens."""
    return not settings.path.startswith(PREFIX) and bool(local_files(settings))


def local_files(settings: CalibrationConfig) -> list[DataFile]:
    """The local files that calibration.path names, in the order in which they are read; [] for a
    source on the hub, and for a mixture, whose path is empty.

    Of a folder, these are the files of records or, without any, the texts, but not those whose
    names begin with a dot. UserError if there is no such file.
    """
    path = settings.path
    if not path or HUB_FILE.fullmatch(path):
        return []
    file = DataFile(local_path(path), _SETTING)
    if file.path.is_dir():
        files = _visible_files(file.path)
        records = [other for other in files if _has_records(other, settings)]
        others = (other for other in files if other.suffix not in READERS)
        # images have zero bytes, texts have none
        chosen = records or [other for other in others if b"\0" not in other.content()]
        if not chosen:
            raise file.error("has no texts and no records: expected a file such as train.jsonl")
        return chosen
    if not file.path.exists():
        if _may_be_hub_id(path):
            return []
        names = (neighbour.name for neighbour in file.path.parent.glob("*"))
        nearest_name = nearest(file.path.name, names)
        hint = (
            f"did you mean {file.path.parent / nearest_name}?"
            if nearest_name
            else "expected a text or JSON lines file, or a hub id"
        )
        raise UserError(f"{_SETTING}={path} does not exist: {hint}")
    return [file]


def _has_records(file: DataFile, settings: CalibrationConfig) -> bool:
    """Whether a file of a folder is one of records. JSON and tables may be other data, such as
    package.json: they are files of records if the first of their records is a document."""
    if file.suffix not in UNCERTAIN or settings.field or settings.template:
        return file.suffix in READERS
    try:
        return bool(_documents(file.rows(), settings, most=1).documents)
    except UserError:
        return False


def _visible_files(folder: Path) -> list[DataFile]:
    """The files below a folder, by path, without those whose path has a name that begins with a
    dot."""
    return [
        DataFile(path, _SETTING)
        for path in sorted(folder.rglob("[!.]*"))
        if path.is_file() and "/." not in str(path.relative_to(folder.parent))
    ]


def _may_be_hub_id(path: str) -> bool:
    """Whether `path` may be the id of a data set on the hub: NAME or OWNER/NAME. False if `path`
    seems to be a mistyped path of a local file."""
    parent = Path(path).parent
    folder_exists = parent != Path(".") and parent.is_dir()
    looks_like_file = path.lower().endswith((".txt", ".md", *READERS, *CODECS))
    return HUB_ID.fullmatch(path) is not None and not looks_like_file and not folder_exists


def wikitext_lines(text: str) -> list[str]:
    """The lines of a text, in the form that rows of WikiText have on the hub. A blank line is "".
    Any other line ends with a line feed."""
    rows = text.removesuffix("\n").split("\n") if text else []
    return [f"{row}\n" if row.strip() else "" for row in rows]


def read_as_one_text(file: Path, setting: str) -> str:
    """The content of a text file, with Unix line ends. For a file with records, the texts of all
    records, joined by blank lines. `setting`: name of the setting that names the file. UserError
    for a conversation that only a chat template can turn into text."""
    # `joined`: empty records are not left out
    settings = CalibrationConfig("text", str(file), joined=True)
    documents = _documents(DataFile(file, setting).rows(), settings)
    return joined_texts(documents.documents, f"{setting}={file}")


def joined_texts(documents: Sequence[Document], source: str) -> str:
    """The texts of the documents, joined by blank lines. `source`: setting and value that name the
    set. UserError for a conversation that only a chat template can turn into text."""
    texts = [document.plain.text for document in documents if document.plain]
    if len(texts) < len(documents):
        raise UserError(
            f"{source} holds conversations: expected a file of texts, which are read as they stand"
        )
    return BLANK_LINE.join(texts)


def download(settings: CalibrationConfig) -> list[DataFile]:
    """Download the file or data set at `settings.path` if it is on the hub. Returns the local copy
    of a file. UserError when the download fails."""
    from huggingface_hub import hf_hub_download

    path = settings.path
    if not (hub_path := HUB_FILE.fullmatch(path)):
        if not local_files(settings):
            next(hub_rows(settings), None)  # the generator downloads before it yields the first row
        return []
    name, file = hub_path.groups()
    try:
        return [DataFile(Path(hf_hub_download(name, file, repo_type="dataset")), _SETTING)]
    except (OSError, ValueError) as error:
        raise _unreachable_error(path, error) from error


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
    return UserError(
        f"calibration.path={path} is no file here and could not be had from the hub "
        f"({reason_in(error)}): expected a file, or a data set's id while the hub can be reached"
    )


# A file.


CODECS = {".gz": "gzip", ".zst": "zstd"}
"""Suffix of compressed files -> name of their compression in pyarrow."""
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|(u[dD][89a-fA-F]\w\w)|.)", re.DOTALL
)
"""An escape in JSON. Group 1: half of a surrogate pair; a whole pair is one character, such as an
emoji."""

Rows = Iterator[tuple[str, Any]]
"""Pairs (location, record). A location has the form "FILE line NUMBER". The record of a text file
is its text."""


@dataclass(frozen=True)
class DataFile:
    """A file, which need not exist before it is read."""

    path: Path
    setting: str
    """Name of the setting that names the file, for error messages."""

    @property
    def suffix(self) -> str:
        """The suffix in lower case, without that of a compression."""
        name = Path(self.path.name.lower())
        return Path(name.stem).suffix if name.suffix in CODECS else name.suffix

    def rows(self) -> Rows:
        """Yield the rows; a file with an unknown suffix, such as source code, is a text. UserError
        for a file that cannot be read, with the line of the mistake where there is one."""
        return READERS.get(self.suffix, _read_document)(self)

    def content(self) -> bytes:
        """The decompressed content. UserError for a file that cannot be read."""
        codec = CODECS.get(self.path.suffix.lower())
        try:
            if codec is None:
                return self.path.read_bytes()
            import pyarrow

            with pyarrow.input_stream(str(self.path), compression=codec) as stream:
                content: bytes = stream.read()
            return content
        except OSError as error:
            raise self.error(f"cannot be read: {error.strerror or error}") from error

    def text(self) -> str:
        """The content of a UTF-8 text. UserError for any other file."""
        raw = self.content()
        try:
            text = raw.decode("utf-8-sig")
            # a zero byte is a sign of UTF-16 or of a binary format
            position = raw.find(0)
        except UnicodeDecodeError as error:
            position = error.start
        if position >= 0:
            line = raw.count(b"\n", 0, position) + 1
            raise self.error(
                f"is not UTF-8 text: line {line} has the byte {raw[position]:#04x} (byte "
                f"{position})"
            )
        return text

    def error(self, problem: str) -> UserError:
        return UserError(f"{self.setting}={self.path} {problem}")


def _read_document(file: DataFile) -> Rows:
    """The whole file, with Unix line ends."""
    yield str(file.path), file.text().replace("\r\n", "\n")


def _read_json(file: DataFile) -> Rows:
    """A record on each line, or a list of records."""
    text = file.text()
    for escape in _ESCAPE.finditer(text):
        if escape[1]:
            number = text.count("\n", 0, escape.start()) + 1
            raise UserError(
                f"{file.path} line {number} has half an emoji, \\{escape[1]}: expected both halves"
            )
    start_line = 1
    try:
        if text.lstrip().startswith("["):
            for number, record in enumerate(json.loads(text), start=1):
                yield f"{file.path} record {number}", record
            return
        # str.splitlines would also cut at separators that JSON strings may hold unescaped
        for start_line, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield f"{file.path} line {start_line}", json.loads(line)
    except (ValueError, RecursionError) as error:
        # damaged JSON, too long a number, or too deeply nested brackets
        # json.loads counts lineno from 1 at `start_line`
        line_of_error = start_line + getattr(error, "lineno", 1) - 1
        raise UserError(
            f"{file.path} line {line_of_error} is damaged JSON: {getattr(error, 'msg', error)}"
        ) from None


def _read_csv(file: DataFile) -> Rows:
    """A table whose first line has the names of the fields. They are separated by the most frequent
    of comma, semicolon and tab."""
    csv.field_size_limit(sys.maxsize)
    text = file.text()
    header = text.partition("\n")[0]
    table = csv.DictReader(
        io.StringIO(text, newline=""), delimiter=max(",;\t", key=header.count), strict=True
    )
    try:
        for record in table:
            # DictReader puts superfluous values under None, None in place of missing values, and
            # the last of the values of fields with one name
            if len(record) != len(table.fieldnames or ()) or None in record.values():
                raise csv.Error(f"expected a value for each of the fields {header.strip()}")
            yield f"{file.path} line {table.line_num}", record
    except csv.Error as error:
        raise UserError(f"{file.path} line {table.line_num} is damaged CSV: {error}") from None


def _read_parquet(file: DataFile) -> Rows:
    import pyarrow
    from pyarrow import parquet

    try:
        records = parquet.read_table(pyarrow.BufferReader(file.content())).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise file.error(f"cannot be read: {reason_in(error)}") from error
    yield from ((f"{file.path} row {number}", record) for number, record in enumerate(records, 1))


READERS: dict[str, Callable[[DataFile], Rows]] = {
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), _read_json),
    **dict.fromkeys((".csv", ".tsv"), _read_csv),
    ".parquet": _read_parquet,
}
"""Suffix -> function that yields the rows of a file."""
UNCERTAIN = (".json", ".csv", ".tsv")
"""Suffixes of files that may have other content than records."""
