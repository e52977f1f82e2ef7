"""The papers' numbers: one schema, this project's words, no number twice, misprints, and memory from conf/model."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from handmade import of_tables
from omegaconf import OmegaConf

from analysis import names
from analysis.load import plans
from analysis.published.numbers import (
    AFTER,
    AVERAGE,
    BEFORE,
    FOLDER,
    GROUPS,
    NOT_COMPARABLE,
    PAPERS,
    RANK,
    SCORES,
    TABLES,
    Printed,
    counterparts,
    numbers,
    protocol,
    split,
)
from analysis.registry import outputs

ROOT = Path(__file__).parents[2]
COLUMNS = "paper,table,model,ratio,criterion,allocation,recovery,calibration,benchmark,value,note"
OTHERS = {"DiEP", "NAEE", "D2-MoE", "MoE-I²", "HC-SMoE", "MC-SMoE", "Sub-MoE", "He et al.", "C-Prune", "Wanda"}
"""Methods in the papers' tables that are not built here."""
WORDS = {
    "criterion": {"any", "na", *OTHERS, "best calibration-based"}
    | {"AIMER minus best baseline", "AIMER minus best calibration-based"},
    "allocation": {"none", "na", "uniform", "DiEP", "coverage aligned 256", "coverage aligned 256 scores"}
    | {"coverage true attribution", *(f"{start}top-k {k}" for start in ("", "coverage ") for k in (1, 2, 4, 6))},
    "recovery": {"none", "nf4", "q8", "dora", "dora_nf4"},
    "calibration": {"none", "na", "matched"},
}
"""Words that no setting of this project is called by."""
ROWS = {"unified": 1310, "evoesap": 1670, "heapr": 371, "aimer": 19, "coverage": 794}


def stems(*folders: str) -> set[str]:
    return {file.stem for folder in folders for file in (ROOT / folder).glob("*.yaml")}


def labels(*folders: str) -> set[str]:
    """What a study's record calls the settings in these folders."""
    names_of = set()
    for file in (file for folder in folders for file in (ROOT / folder).glob("*.yaml")):
        settings = OmegaConf.load(file)
        replacement = f", replacement={settings.replacement}" if "replacement" in settings else ""
        named = settings.get("label", settings.name if replacement else file.stem)
        names_of.add(f"{named}{replacement}")
    return names_of


def field(name: str) -> set[str]:
    place = ("model", "ratio", "criterion", "allocation", "recovery", "calibration").index(name)
    return {str(number.key[place]) for number in numbers()}


def test_every_file_has_the_one_schema_and_no_number_twice() -> None:
    for name in PAPERS:
        lines = (FOLDER / f"{name}.csv").read_text(encoding="utf-8").splitlines()
        assert lines[0] == COLUMNS
        assert {len(row) for row in csv.reader(lines)} == {len(COLUMNS.split(","))}
    assert Counter(number.paper for number in numbers()) == ROWS
    keys = Counter((number.paper, number.table, number.key, number.benchmark) for number in numbers())
    assert [key for key, times in keys.items() if times > 1] == []


def test_models_and_methods_are_called_as_they_are_here() -> None:
    assert field("model") - stems("conf/model") == {"all"}
    assert field("criterion") - set(names.CRITERIA) == WORDS["criterion"]
    assert field("allocation") - labels("conf/allocation", "sweeps/allocation") <= WORDS["allocation"]
    assert field("recovery") <= WORDS["recovery"]
    assert field("calibration") - stems("conf/calibration") == WORDS["calibration"]


def test_scores_are_shares_of_known_items_and_tables_here_have_counterparts() -> None:
    sets = stems("conf/calibration")
    for number in numbers():
        assert math.isfinite(number.value) and (math.isnan(number.key[1]) or 0 <= number.key[1] < 1)
        if number.benchmark in (*SCORES, *GROUPS, AVERAGE):
            assert 0 <= number.value <= 1, number
        elif number.benchmark == RANK:
            assert 1 <= number.value <= 9
        if number.benchmark in names.BENCHMARKS:
            assert split(number, number.benchmark).items, number
        quoted = number.paper == "coverage" and number.key[2] == "mone"  # from another paper, that does not say it
        if number.benchmark in SCORES and number.key[2] in names.CRITERIA and number.key[5] in sets:
            assert bool(protocol(number).tokens) != quoted, number
    assert set(TABLES) <= set(outputs()) and all(counterparts(name) for name in TABLES)


def test_full_splits_print_shares_of_their_items() -> None:
    """A score of a benchmark with few items is k/n; every one that is not is noted."""
    odd = []
    for number in numbers():
        items = split(number, number.benchmark).items if number.benchmark in names.BENCHMARKS else None
        if items is None or number.note.startswith(NOT_COMPARABLE):
            continue
        if number.benchmark != "wildbench" and items <= 10 ** (len(number.text) - 2):
            low, high = number.ends
            nearest = round(number.value * items)
            if not any(low <= k / items <= high for k in (nearest - 1, nearest, nearest + 1)):
                odd.append((number.paper, number.table, number.benchmark, number.text))
    assert odd == []


@pytest.mark.parametrize(
    ("text", "note", "ends"),
    [
        ("0.341", "", (0.3405, 0.3415)),
        ("0.50", "truncated, the mean of the row is .5057", (0.50, 0.51)),
        ("0.820", "off the 1/277 grid by one unit: rounded twice", (0.819, 0.821)),
        ("29", "", (28.5, 29.5)),
    ],
)
def test_the_ends_of_a_printed_number(text: str, note: str, ends: tuple[float, float]) -> None:
    found = Printed("unified", "1", ("m", 0.25, "man", "uniform", "none", "c4"), "Avg", text, note).ends
    assert found == pytest.approx(ends)


GIB = 2**30
WITHIN = 0.01
ANGLES = {"deepseek_v2_lite_chat": 163840 * 64, "qwen3_30b_a3b_instruct": 262144 * 128}
"""Positions x rotary dimensions: vLLM keeps a table of cosines and sines in bfloat16, as long as the context."""
SLIPS = {("unified", "qwen3_30b_a3b_instruct", BEFORE): 0.013, ("evoesap", "qwen3_30b_a3b_instruct", BEFORE): 0.013}
"""Printed totals that the sum misses by more than WITHIN, and by how much. What is freed is held in test_expected."""


def totals() -> Iterator[tuple[Printed, float]]:
    """Every printed total, and the GiB of parameters that are left (experts and their rows of the router removed)."""
    for number in (*of_tables("unified", "3"), *of_tables("evoesap", "3")):
        if number.benchmark in (BEFORE, AFTER):
            share = number.key[1] if number.benchmark == AFTER else 0.0
            yield number, parameters(number.key[0], share) * plans.BYTES / GIB


def parameters(model: str, share: float) -> int:
    known = OmegaConf.load(ROOT / "conf" / "model" / f"{model}.yaml").expected
    sizes = {"expert_parameters": 3 * known.hidden * known.width, "router_parameters_per_expert": known.hidden}
    gone = {str(layer): int(known.experts * share) for layer in range(known.moe_layers)}
    return int(known.parameters) - plans.removed_parameters(dict.fromkeys(gone, sizes), gone, gone, {})


def kept_besides(model: str, share: float) -> float:
    """GiB that a server keeps besides parameters in bfloat16: rotary angles; ERNIE's routers are in float32."""
    known = OmegaConf.load(ROOT / "conf" / "model" / f"{model}.yaml").expected
    routers = known.moe_layers * known.experts * known.hidden * (1 - share) if model.startswith("ernie") else 0
    return 2 * (ANGLES.get(model, 0) + routers) / GIB


def test_totals_are_parameters_and_what_a_server_keeps_besides() -> None:
    """A measured size is exact, so it is compared only where the printed one holds nothing but parameters."""
    missed = {}
    for number, ours in totals():
        model, share = number.key[0], number.key[1] if number.benchmark == AFTER else 0.0
        low, high = number.ends if number.text == "12.9" else (number.value, number.value)
        total = ours + kept_besides(model, share)
        off = max(low - total, total - high, 0)
        if off > WITHIN:
            missed[number.paper, model, number.benchmark] = off
        low, high = number.ends
        assert low - WITHIN <= ours <= high + WITHIN or number.note.startswith(NOT_COMPARABLE), (number, ours)
    assert missed == pytest.approx(SLIPS, abs=0.0005)
