"""The small store behind the golden tables, and the tables themselves: made anew by

    python tests/analysis/golden_store.py store     golden/store.tar.xz, then the tables
    python tests/analysis/golden_store.py tables    the tables alone, from the store as it is committed

Look at what `git diff tests/analysis/golden` says before committing either.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
import tempfile
from pathlib import Path

import pandas as pd
import synthetic_sums
from synthetic import record_path, write_store
from synthetic_plans import EXPERTS, LAYERS, rng

from analysis.load.study import Study, load
from analysis.published.numbers import TABLES
from analysis.published.tables import published_tables
from analysis.registry import Item, Results, make, outputs
from analysis.render import table as rendering
from analysis.render.style import Figure
from analysis.render.table import Table

GOLDEN = Path(__file__).parent / "golden"
STORE = GOLDEN / "store.tar.xz"
TASKS = ("humaneval", "livecodebench", "gsm8k", "math500", "rte", "winogrande")
SIZES = {"text_8k": 8000, "text_65k": 65000}
"""Calibration sets of one text, and the tokens they read."""


def write(root: Path) -> Path:
    """A store whose studies, taken together, have something for every output; returns its root."""
    usual = {"tasks": TASKS, "items": 12, "overlap": False}
    general, code = {"calibrations": ("pocket_general",)}, {"calibrations": ("pocket_code",)}
    experts = ("frequency", "reap", "man", "aimer", "magnitude")
    write_store(root, name="experts", criteria=experts, **{**usual, "overlap": True})
    write_store(root, name="sizes", criteria=("reap",), calibrations=tuple(SIZES), ratios=(0.5,), **usual)
    write_store(root, name="searched", criteria=("reap", "man"), allocations=("evolutionary",), **code, **usual)
    write_store(root, name="quantised", criteria=("reap",), recoveries=("nf4",), ratios=(0.5,), **code, **usual)
    inside = ("layerwise", "global")
    write_store(
        root, name="heapr", criteria=("heapr",), ratios=(0.25, 0.5, 0.75), allocations=inside, **general, **usual
    )
    write_store(
        root, name="camera", criteria=("camera",), ratios=(0.5,), allocations=("layerwise",), **general, **usual
    )
    spread = ("uniform", "coverage", "coverage, smoothing log", "coverage aligned 64", "coverage aligned 128")
    write_store(
        root, name="channels", criteria=("channel_activation",), ratios=(0.5,), allocations=spread, **general, **usual
    )
    write_store(root, name="weights", criteria=("channel_weight",), ratios=(0.5,), allocations=("coverage",), **usual)
    synthetic_sums.add(root, "channels", "coverage", ("channel_activation",))
    _same_text(root)
    _weight_scores(root)
    _fail_one(root)
    return root


def _same_text(root: Path) -> None:
    for name, tokens in SIZES.items():
        for path in (root / "statistics").glob(f"*{name}*/calibration.json"):
            report = json.loads(path.read_text())
            path.write_text(json.dumps({**report, "valid_tokens": {name: tokens}, "sha256": "one text"}))


def _weight_scores(root: Path) -> None:
    study = json.loads(record_path(root, "experts").read_text())
    for entry in study["cells"]:
        if entry["cell"]["criterion"] in ("aimer", "magnitude"):
            folder = root / entry["scores"]
            folder.mkdir(parents=True, exist_ok=True)
            drawn = rng("weights", entry["cell"]["criterion"]).lognormal(0, 0.4, LAYERS * EXPERTS)
            places = [{"layer": at // EXPERTS, "expert": at % EXPERTS, "score": s} for at, s in enumerate(drawn)]
            pd.DataFrame(places).to_parquet(folder / "scores.parquet", index=False)


def _fail_one(root: Path) -> None:
    """One benchmark of one cell was never evaluated."""
    path = record_path(root, "sizes")
    study = json.loads(path.read_text())
    study["cells"][-1]["evaluate"]["rte"] = None
    study["cells"][-1]["errors"] = {"rte": "out of memory"}
    path.write_text(json.dumps(study))


def pack(root: Path, archive: Path) -> None:
    """The store as one small file, the same for the same content."""
    with tarfile.open(archive, "w:xz", preset=9) as packed:
        for path in sorted(path for path in root.rglob("*") if path.is_file()):
            entry = tarfile.TarInfo(path.relative_to(root).as_posix())
            content = path.read_bytes()
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))


def unpack(root: Path) -> Study:
    """The committed store unpacked into `root`, all its studies read as one."""
    with tarfile.open(STORE) as packed:
        packed.extractall(root)  # ours; Debian 12's Python 3.11.2 has no filters
    return load(root, "all")


def everything(study: Study) -> list[Item]:
    """Every table and figure of `analysis all --compare`."""
    results = Results(study)
    made = [output for each in make(outputs(), results).values() for output in each]
    compared = published_tables(study, results.comparisons, list(TABLES)).values()
    return [*made, *(table for table in compared if len(table.frame))]


def tables(made: list[Item]) -> dict[str, Table]:
    return {output.name: output for output in made if isinstance(output, Table)}


def figures(made: list[Item]) -> dict[str, Figure]:
    return {output.name: output for output in made if isinstance(output, Figure)}


def main(words: list[str]) -> int:
    if words not in (["store"], ["tables"]):
        print(__doc__)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        if words == ["store"]:
            GOLDEN.mkdir(exist_ok=True)
            pack(write(Path(folder) / "written"), STORE)
        made = tables(everything(unpack(Path(folder) / "read")))
    for path in GOLDEN.glob("*.csv"):
        path.unlink()
    for name, table in made.items():
        (GOLDEN / f"{name}.csv").write_text(rendering.csv(table), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
