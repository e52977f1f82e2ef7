"""The small store behind the golden tables and figures, and these themselves: made anew by

    python tests/analysis/golden_store.py store     golden/store.tar.xz, then the tables and figures
    python tests/analysis/golden_store.py tables    these alone, from the committed store

Look at what `git diff tests/analysis/golden` says before committing either.
"""

import io
import json
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import synthetic_sums
from synthetic import (
    CALIBRATIONS,
    edited_document,
    record_path,
    write_frame,
    write_json,
    write_store,
)
from synthetic_plans import EXPERTS, LAYERS, rng
from synthetic_sums import MIB

from moe_lab.analysis.load.study import Study, load
from moe_lab.analysis.registry import Results, outputs
from moe_lab.analysis.render import table as rendering
from moe_lab.analysis.render.charts import Figure
from moe_lab.analysis.render.table import Table
from moe_lab.result_files import TIMINGS

GOLDEN = Path(__file__).parent / "golden"
STORE = GOLDEN / "store.tar.xz"
CAPTIONS = GOLDEN / "captions.txt"
ROWS = ".rows.csv"
"""End of the names of the files with the rows of figures."""
TASKS = ("humaneval", "livecodebench", "gsm8k", "math500", "rte", "winogrande")
SIZES = {"text_8k": 8000, "text_65k": 65000}
"""Calibration sets of one text, and the tokens they read."""


def write(root: Path) -> Path:
    """Write a store whose studies together have data for nearly every output; returns its root."""
    write_study = partial(write_store, root, tasks=TASKS, items=12)
    two_ratios = {"ratios": (0.25, 0.5)}
    general = {"calibrations": ("pocket_general",)}
    experts = ("frequency", "reap", "man", "aimer", "magnitude")
    replacements = ("uniform, replacement=mean_output", "uniform, replacement=hc_smoe")
    budgets = (
        "uniform",
        "coverage",
        "coverage, smoothing log",
        "coverage, prior ala2",
        "coverage, prior loss",
    )
    blocks = ("coverage aligned 64", "coverage aligned 128", "coverage min 64", "coverage min 256")
    studies: dict[str, dict[str, Any]] = {
        "experts": {
            "criteria": experts,
            "calibrations": CALIBRATIONS,
            "overlap": True,
            **two_ratios,
        },
        "chance": {"criteria": ("random",), "random_seeds": (1, 2, 3), **general},
        "sizes": {"criteria": ("reap",), "calibrations": tuple(SIZES)},
        "searched": {"criteria": ("reap", "man"), "allocations": ("evolutionary",), **two_ratios},
        "fitness": {
            "criteria": ("reap",),
            "allocations": ("evolutionary spec dec",),
            **two_ratios,
        },
        "text": {
            "criteria": ("reap",),
            "allocations": ("evolutionary",),
            **general,
            **two_ratios,
        },
        "quantised": {"criteria": ("reap",), "recoveries": ("nf4",)},
        "replaced": {"criteria": ("reap",), "allocations": replacements},
        "heapr": {
            "criteria": ("heapr",),
            "allocations": ("layerwise", "global"),
            "ratios": (0.25, 0.5, 0.75),
            **general,
        },
        "camera": {"criteria": ("camera",), "allocations": ("layerwise",), **general},
        "channels": {
            "criteria": ("channel_activation",),
            "allocations": (*budgets, *blocks),
            **general,
        },
        "snip": {"criteria": ("snip",), "allocations": ("coverage",), **general},
        "weights": {"criteria": ("channel_weight",), "allocations": ("coverage",)},
    }
    for name, axes in studies.items():
        write_study(name=name, **axes)
    for study in ("channels", "snip"):
        synthetic_sums.add_statistics(root, study, "coverage, prior loss")
    _make_texts_equal(root)
    _weight_scores(root)
    add_timings(root, "channels")
    _fail_one(root)
    return root


def _make_texts_equal(root: Path) -> None:
    for name, tokens in SIZES.items():
        for path in (root / "statistics").glob(f"*{name}*/calibration.json"):
            with edited_document(path) as report:
                report |= {"valid_tokens": {name: tokens}, "sha256": "one text"}


def _weight_scores(root: Path) -> None:
    study = json.loads(record_path(root, "experts").read_text())
    for entry in study["cells"]:
        if entry["cell"]["criterion"] in ("aimer", "magnitude"):
            scores = rng("weights", entry["cell"]["criterion"]).lognormal(0, 0.4, LAYERS * EXPERTS)
            rows = [
                {"layer": index // EXPERTS, "expert": index % EXPERTS, "score": s}
                for index, s in enumerate(scores)
            ]
            write_frame(root / entry["scores"] / "scores.parquet", pd.DataFrame(rows))


def add_timings(root: Path, name: str) -> None:
    """Add timings of every model of a study: three requests of 2 prompts, and three of 4
    prompts."""
    device_fields = {"device": "A GPU", "dtype": "bfloat16", "threads": 4, "load": 0.25}
    with edited_document(record_path(root, name)) as study:
        for number, entry in enumerate(study["cells"]):
            entry["timing"] = f"timing/{name}-{number}"
            write_json(
                root / entry["timing"] / "timing.json",
                {**device_fields, "weight_bytes": (20 - number) * MIB},
            )
            rows = [
                (
                    prompts,
                    50,
                    10,
                    repeat,
                    0.1 * prompts * 2**repeat,
                    0.5 * (number + 1) * 2**repeat,
                    2.0 * MIB,
                )
                for prompts in (2, 4)
                for repeat in range(3)
            ]
            write_frame(
                root / entry["timing"] / "timing.parquet", pd.DataFrame(rows, columns=list(TIMINGS))
            )


def _fail_one(root: Path) -> None:
    """One benchmark of one cell was never evaluated."""
    with edited_document(record_path(root, "sizes")) as study:
        study["cells"][-1]["evaluate"]["rte"] = None
        study["cells"][-1]["errors"] = {"rte": "out of memory"}


def pack(root: Path, archive: Path) -> None:
    """Write the store into one small file; equal stores give equal files."""
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for path in sorted(path for path in root.rglob("*") if path.is_file()):
            entry = tarfile.TarInfo(path.relative_to(root).as_posix())
            content = path.read_bytes()
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def unpack(root: Path) -> Study:
    """Unpack the committed store into `root`; returns all its studies, read as one."""
    with tarfile.open(STORE) as tar:
        tar.extractall(root)  # ours; Debian 12's Python 3.11.2 has no filters
    return load(root, "all")


def tables_and_figures(study: Study) -> tuple[dict[str, Table], dict[str, Figure]]:
    """Every table and every figure of `analysis all` by name."""
    results = Results(study)
    items = [item for output in outputs().values() for item in output.items(results)]
    tables = {item.name: item for item in items if isinstance(item, Table)}
    return tables, {item.name: item for item in items if isinstance(item, Figure)}


def figure_text(figure: Figure) -> str:
    """The rows of a figure as CSV, in which numbers have five digits."""
    return str(figure.rows.to_csv(index=False, float_format="%.5g"))


def captions(items: Iterable[Table | Figure], store: Path) -> list[str]:
    """Name, title and caption of each table and figure, and the notes of tables, without the
    folder of the store."""
    lines = []
    for item in items:
        notes = rendering.footnotes(item) if isinstance(item, Table) else []
        texts = [item.name, item.title, item.caption, *notes]
        lines.append(" | ".join(texts).replace(str(store), "STORE"))
    return sorted(lines)


def main(arguments: list[str]) -> int:
    if arguments not in (["store"], ["tables"]):
        print(__doc__)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        if arguments == ["store"]:
            GOLDEN.mkdir(exist_ok=True)
            pack(write(Path(folder) / "written"), STORE)
        study = unpack(Path(folder) / "read")
        tables, figures = tables_and_figures(study)
    for path in GOLDEN.glob("*.csv"):
        path.unlink()
    for name, table in tables.items():
        (GOLDEN / f"{name}.csv").write_text(rendering.csv(table), encoding="utf-8")
    for name, figure in figures.items():
        (GOLDEN / f"{name}{ROWS}").write_text(figure_text(figure), encoding="utf-8")
    lines = captions([*tables.values(), *figures.values()], study.store)
    CAPTIONS.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
