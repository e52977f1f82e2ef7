"""Scores of experts and channels from files: tables, and what other tools write. No torch, unless a
file is one of torch."""

from __future__ import annotations

import json
import re
import struct
from collections import ChainMap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moe_lab.errors import UserError, check_known, reason_in
from moe_lab.paths import local_path

SCORES = ("score", "reap", "saliency", "count", "counts")
"""Usual names of scores."""
RETAINED = ("retained", "kept_experts", "kept", "keep")
"""Usual names of the ids of retained experts."""
NUMBER = re.compile(r"\d+")
IMATRIX_TENSOR = re.compile(
    rb"(?:blk\.(?P<layer>\d+)\.ffn_down_exps|[\w.]+)\.weight\.(?P<name>counts|in_sum2)"
)
"""Name of a tensor in an importance matrix; `layer` of the down projections of experts."""


def parse_json(text: str) -> Any:
    """The JSON document `text`. For JSON lines with one layer in each, an object of all layers.
    ValueError or TypeError for other texts."""
    try:
        return json.loads(text)
    except ValueError:
        return dict(ChainMap(*map(json.loads, filter(None, text.splitlines()))))


def _read_json(path: Path) -> Any:
    content = parse_json(path.read_text(encoding="utf-8-sig"))
    return pd.DataFrame(content) if isinstance(content, list) else content


def _read_torch(path: Path) -> Any:
    """REAP's observations: layer -> name of a score -> tensor (E,)."""
    import torch

    return torch.load(path, map_location="cpu", weights_only=True)


def _read_imatrix(path: Path) -> dict[int, dict[str, Any]]:
    """llama.cpp's importance matrix: layer -> "counts" (E,), tokens of each expert, and "in_sum2"
    (E, I), the sum of the squares of each channel."""
    content = path.read_bytes()
    infos = list(IMATRIX_TENSOR.finditer(content))
    if not infos:
        raise ValueError("it is no importance matrix")
    # after its name, a tensor has the number of its axes, their lengths, its type and the position
    # of its fp32 numbers, which follow the last such description at a multiple of 32
    start = infos[-1].end() + 32
    start += -start % 32
    layers: dict[int, dict[str, Any]] = {}
    for info in infos:
        _axes, columns, rows, _type, offset = struct.unpack_from("<IQQIQ", content, info.end())
        if info["layer"]:
            values = np.frombuffer(content, "<f4", rows * columns, start + offset)
            layers.setdefault(int(info["layer"]), {})[info["name"].decode()] = values.reshape(
                rows if columns == 1 else (rows, columns)
            )
    return layers


READERS: Mapping[str, Callable[[Path], Any]] = {
    ".parquet": pd.read_parquet,
    ".csv": pd.read_csv,
    ".json": _read_json,
    ".jsonl": _read_json,
    ".pt": _read_torch,
    ".gguf": _read_imatrix,
}
"""Suffix of a file -> the function that reads it: a data frame for `_rows`, or what `_layers`
takes."""


def _rows(frame: pd.DataFrame, column: str | None) -> pd.DataFrame:
    """The table in a data frame. SGLang's expert distribution has layer_id, expert_id, count."""
    name = _score_name(frame, column)
    names = {"layer_id": "layer", "expert_id": "expert", name: "score"}
    frame = frame.rename(columns=names)
    frame.attrs = {"missing": 0} if name == "count" else {}  # experts that no token went to
    return frame


def _score_name(names: Any, column: str | None) -> str:
    """`column`, or the first of SCORES and RETAINED, that is in `names`."""
    for name in (column,) if column else (*SCORES, *RETAINED):
        if name in names:
            return name
    expected = column or " or ".join(SCORES)
    raise ValueError(
        f"it has {', '.join(map(str, names))}, without {expected}: set criterion.parameters.column"
    )


def _layers(content: Any, column: str | None) -> pd.DataFrame:
    """The table of an object whose keys contain numbers of layers. The values are scores of all
    experts (E,) or channels (E, I), or ids of retained experts, the best first, or objects with
    one of these by name. In reports of llm-compressor, a name has a list of scores for each layer
    with experts; their numbers are positions of layers then, and attrs has "positions"."""
    if not isinstance(content, dict):
        raise ValueError("expected an object of layers")
    attrs = {}
    if not _has_layers(content):
        # such as {"retained": {"0": [3, 1]}, "ratio": 0.5}
        parts = [part for part in content.values() if _has_layers(part)]
        if len(parts) != 1:
            parts = [dict(enumerate(content[_score_name(content, column)]))]
            attrs["positions"] = True
        content = parts[0]
    frames = []
    forms = set()
    for key, value in content.items():
        number = NUMBER.search(str(key))
        name = _score_name(value, column) if isinstance(value, Mapping) else RETAINED[0]
        scores = value[name] if isinstance(value, Mapping) else value
        values = np.asarray(scores.tolist() if hasattr(scores, "tolist") else scores)
        if number is None or values.ndim not in (1, 2):
            raise ValueError(f"{key} is no layer with a list of numbers")
        is_retained = name in RETAINED and isinstance(scores, list) and values.dtype.kind == "i"
        forms.add(is_retained)
        ids = np.indices(values.shape).reshape(values.ndim, -1)
        if is_retained:
            ids, values = values[None], np.arange(len(values), 0, -1)
        columns = dict(zip(("expert", "channel"), ids, strict=False))
        frames.append(pd.DataFrame({"layer": int(number[0]), **columns, "score": values.ravel()}))
    if len(forms) > 1:
        raise ValueError("some layers have ids of experts, others have scores")
    frame = pd.concat(frames, ignore_index=True)
    frame.attrs.update(attrs, **({"missing": 0, "retained": True} if True in forms else {}))
    return frame


def _has_layers(content: Any) -> bool:
    """Whether `content` is an object whose keys all contain the number of a layer."""
    return isinstance(content, Mapping) and all(NUMBER.search(str(key)) for key in content)


def retained_experts(content: Any) -> dict[str, list[int]] | None:
    """Layer -> ids of its retained experts, in the JSON document that another tool wrote. None if
    it has no such ids."""
    try:
        frame = _layers(content, None)
    except (ValueError, TypeError):
        return None
    if "retained" not in frame.attrs:
        return None
    return {str(layer): ids.tolist() for layer, ids in frame.groupby("layer")["expert"]}


def read_table(path: str, column: str | None = None) -> pd.DataFrame:
    """The table in the file `path`: "layer", "expert", possibly "channel", and "score". `column`:
    name of the scores in the file; None: the usual one. If rows of experts may be missing,
    `attrs["missing"]` is their score. UserError for a file that cannot be read."""
    file = local_path(path)
    suffix = file.suffix.lower()
    check_known("suffix of criterion.parameters.path", suffix, READERS)
    try:
        content = READERS[suffix](file)
        return (_rows if isinstance(content, pd.DataFrame) else _layers)(content, column)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a library raises for another file
        raise UserError(
            f"criterion.parameters.path={path} holds no scores that can be read as {suffix}: "
            f"{reason_in(error)}"
        ) from None


def read_scores(
    layers: Mapping[int, Mapping[str, Any]],
    criterion: str,
    path: str,
    column: str | None = None,
) -> dict[int, dict[str, Any]]:
    """Layer -> {"file": scores (E,), or (E, I) for criterion=file_channels} from the file `path`.
    `layers`: layer -> facts. UserError as from `read_table` and `scores_table`."""
    frame = read_table(path, column)
    if ("channel" in frame) != (criterion == "file_channels"):
        other = "file_channels" if "channel" in frame else "file"
        raise UserError(
            f"criterion={criterion} does not suit the scores in {path}: expected criterion={other}"
        )
    table = scores_table(frame, layers, f"criterion.parameters.path={path}")
    return {layer: {"file": scores} for layer, scores in table.items()}


def scores_table(
    frame: pd.DataFrame, layers: Mapping[int, Mapping[str, Any]], origin: str
) -> dict[int, Any]:
    """Layer -> scores of experts (E,), or of channels (E, I). `frame`: a table as from
    `read_table`. `layers`: layer -> facts, such as "width". `origin`: where the table comes from,
    for messages. UserError unless the table has exactly one row for each expert, or for each
    channel."""
    id_columns = ["expert", "channel"] if "channel" in frame else ["expert"]
    columns = ["layer", *id_columns, "score"]
    if missing := [name for name in columns if name not in frame]:
        raise UserError(
            f"{origin}: the scores have columns {', '.join(map(str, frame))}, without "
            f"{missing[0]}: expected {', '.join(columns)}"
        )
    if "positions" in frame.attrs:
        frame = frame.assign(layer=frame["layer"].map(dict(enumerate(sorted(layers)))))
    # what is no number becomes nan, which differs from every layer and every id
    numbers = frame[columns].astype(object).map(_number).astype(float)
    if set(numbers["layer"]) != set(layers):
        found = sorted({str(value) for value in frame["layer"]})
        raise UserError(
            f"{origin}: the scores are of another model: layers {', '.join(found)}, expected "
            f"{[*layers]}"
        )
    table = {}
    for layer, facts in layers.items():
        # [n_experts] for scores of experts, [n_experts, width] for scores of channels
        shape = [int(facts[size]) for size in ("n_experts", "width")[: len(id_columns)]]
        rows = numbers[numbers["layer"] == layer].sort_values(id_columns)
        present = rows[id_columns].to_numpy().T
        expected = np.indices(shape).reshape(len(shape), -1)
        if "missing" in frame.attrs and len(rows) < shape[0]:
            expected = np.intersect1d(present, np.arange(shape[0]))[None]
        if not np.array_equal(present, expected) or (
            "retained" in frame.attrs and len(rows) == shape[0]
        ):
            ranges = " and each ".join(
                f"{name} from 0 to {count - 1}"
                for name, count in zip(id_columns, shape, strict=True)
            )
            raise UserError(
                f"{origin}: the scores of layer {layer} have {len(rows)} rows: expected one for "
                f"each {ranges}"
            )
        scores = np.full(shape, float(frame.attrs.get("missing", 0)))
        scores[tuple(present.astype(int))] = rows["score"]
        table[layer] = scores
    return table


def _number(value: Any) -> float:
    """`value` as a number; nan for what is none."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return np.nan
