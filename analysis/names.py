"""Display names of criteria, benchmarks, methods and numbers, and helpers for sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


def count(number: int, noun: str, plural: str | None = None) -> str:
    """A number and its noun: `1 win`, `1,300 wins`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def capitalised(sentence: str) -> str:
    """The sentence with a capital first letter."""
    return sentence[:1].upper() + sentence[1:]


CRITERIA = {
    "none": "Unpruned",
    "frequency": "Frequency",
    "seer": "SEER",
    "ean": "EAN",
    "reap": "REAP",
    "mone": "MoNE score",
    "mone_freq": "MoNE-freq score",
    "man": "MAN",
    "msan": "MSAN",
    "gate_ean": "Gate-EAN",
    "gate_energy": "Gate energy",
    "easy_ep": "EASY-EP",
    "exact_damage": "Exact damage",
    "aimer": "AIMER",
    "magnitude": "Magnitude",
    "random": "Random",
    "heapr": "HEAPr",
    "camera": "CAMERA",
    "channel_activation": "Channel activation",
    "channel_weight": "Channel weight",
    "channel_weight_activation": "Channel weight × activation",
    "channel_gradient": "Channel gradient",
    "channel_activation_gradient": "Channel activation × gradient",
    "snip": "SNIP",
    "channel_random": "Random channels",
}
"""Registry name -> the papers' spelling, in the order of every table."""

ALLOCATIONS = {
    "uniform": "uniform",
    "layerwise": "layerwise",
    "sequential": "sequential",
    "global": "global",
    "u_shaped": "U-shaped",
    "loss_based": "loss-based",
    "coverage": "coverage",
    "reconstruction": "reconstruction",
    "list": "list",
    "evolutionary": "evolutionary",
    "uniform, protect=super": "super experts protected",
}
"""Allocation in a study's record -> display name, in the order of every table. Other allocations
are displayed as in the record."""

REPLACEMENTS = {
    "": "",
    "mean_output": "novices",
    "m_smoe": "M-SMoE",
    "m_smoe_unaligned": "M-SMoE unaligned",
    "hc_smoe": "HC-SMoE",
    "merge_moe": "MergeMoE groups",
    "ream": "REAM",
}
"""Replacement of dropped experts in a study's record -> display name, in the order of every
table."""

RECOVERIES = {
    "none": "",
    "nf4": "NF4",
    "dora": "DoRA",
    "pocket_dora": "DoRA",
    "dora_nf4": "DoRA, NF4",
    "pocket_dora_nf4": "DoRA, NF4",
    "router_kd": "Router-KD",
    "pocket_router_kd": "Router-KD",
    "distill": "distilled DoRA",
    "pocket_distill": "distilled DoRA",
    "merge_fit": "MergeMoE fit",
    "pocket_merge_fit": "MergeMoE fit",
}
"""Recovery in a study's record -> display name."""

METHODS = {
    ("mone", "uniform, replacement=mean_output"): "MoNE",
    ("mone_freq", "uniform, replacement=mean_output"): "MoNE-freq",
    ("frequency", "global by frequency, replacement=m_smoe"): "M-SMoE",
    ("frequency", "uniform, replacement=hc_smoe"): "HC-SMoE",
    ("reap", "uniform, replacement=ream"): "REAM",
    ("frequency", "uniform, replacement=merge_moe"): "MergeMoE groups",
    ("heapr", "global"): "HEAPr-G",
    ("heapr", "layerwise"): "HEAPr-L",
    ("camera", "sequential"): "CAMERA-P",
    ("camera", "layerwise"): "CAMERA-P (one-shot)",
}
"""Criterion and allocation -> the papers' name of their combination."""

_SEPARATOR = "\x1f"
"""Separator of the parts of a method's key."""

BASELINES = ("frequency", "seer", "ean", "reap", "mone", "mone_freq")
"""The five criteria of the published winner map (Unified Expert Pruning Fig. 2), with two forms of
MoNE."""

RANKED = ("frequency", "seer", "ean", "reap", "mone", "man", "msan")
"""The seven criteria of Unified Expert Pruning Table 1."""

TASK_SPECIFIC = (*RANKED, "gate_ean", "gate_energy")
"""The nine criteria of Unified Expert Pruning Table 2."""

BENCHMARKS = {
    "humaneval": "HumanEval",
    "humaneval_plus": "HumanEval+",
    "mbpp": "MBPP",
    "mbpp_plus": "MBPP+",
    "livecodebench": "LiveCodeBench",
    "wildbench": "WildBench",
    "gsm8k": "GSM8K",
    "math500": "MATH-500",
    "arc_challenge": "ARC-C",
    "arc_easy": "ARC-E",
    "boolq": "BoolQ",
    "hellaswag": "HellaSwag",
    "mmlu": "MMLU",
    "openbookqa": "OBQA",
    "rte": "RTE",
    "winogrande": "WinoGrande",
    "piqa": "PIQA",
    "mathqa": "MathQA",
}
"""Benchmark in results -> the papers' spelling."""

COLUMNS = {
    "Eval+": ("humaneval", "humaneval_plus", "mbpp", "mbpp_plus"),
    "LiveCode": ("livecodebench",),
    "WildBench": ("wildbench",),
    "GSM8K": ("gsm8k",),
    "MATH-500": ("math500",),
    "MC Avg": (
        "arc_challenge",
        "arc_easy",
        "boolq",
        "hellaswag",
        "mmlu",
        "openbookqa",
        "rte",
        "winogrande",
    ),
}
"""The six displayed columns of the papers, each the unweighted mean of its benchmarks."""

MULTIPLE_CHOICE = COLUMNS["MC Avg"]
"""The eight multiple-choice benchmarks of Unified Expert Pruning, EvoESAP and AIMER."""

HEAPR = ("openbookqa", "arc_easy", "winogrande", "hellaswag", "arc_challenge", "piqa", "mathqa")
"""The seven benchmarks of HEAPr, whose Average is their mean."""

COMMON_SENSE = ("piqa", "arc_challenge", "arc_easy", "boolq", "hellaswag", "winogrande")
"""The six benchmarks of MoE-Slimming's Table 10, whose mean its Table 8 calls CSQA Avg."""

GENERAL = (*COMMON_SENSE, "mmlu")
"""The seven benchmarks of MoE-Slimming's Tables 3 and 5, whose Avg is their mean."""

REASONING = ("gsm8k", "humaneval", "math500", "aime25", "gpqa", "livecodebench")
"""The benchmarks of MoE-Slimming's Table 4."""

ABLATION = (*COMMON_SENSE, "gsm8k", "humaneval")
"""The eight benchmarks of MoE-Slimming's other tables of scores, whose Avg is their mean."""

CODE_COLUMNS = ("Eval+", "LiveCode")
MATH_COLUMNS = ("GSM8K", "MATH-500")
AVERAGES = {"Code": CODE_COLUMNS, "Math": MATH_COLUMNS}
"""Published average of displayed columns -> these columns."""

DOMAINS = {"general": ("general", "c4"), "code": ("code",), "math": ("math", "gsm8k")}
"""Domain -> what the names of its calibration sets contain, in the order of tables."""

_BENCHMARKS_OF_DOMAIN = {
    "code": (*COLUMNS["Eval+"], *COLUMNS["LiveCode"]),
    "math": ("gsm8k", "math500", "aime25", "gpqa"),
}
"""Domain -> its benchmarks, as MoE-Slimming assigns them (Section C.1); others are general."""

JOINT = "+"
"""Separator of the sets in the calibration of a cell of `study_by_domain`."""

SAME_ITEMS = {"humaneval_plus": "humaneval", "mbpp_plus": "mbpp"}
"""Benchmark -> the benchmark with the same items and fewer tests of each answer."""

_NAME_AND_SETTINGS = re.compile(
    r"(?P<name>[^,(]+)(\((?P<in_parentheses>.*)\))?(, (?P<after_comma>.*))?"
)
_REPLACEMENT = re.compile(r", replacement=([^,]+)")
_TOP_K_MODEL = re.compile(r"(?P<trained>.+)_top(?P<top_k>\d+)")


def criterion(name: str) -> str:
    """Display name of a criterion, as the papers spell it. The name `s_family(b=1,alpha=0,beta=2)`
    becomes S(1,0,2)."""
    family, values = name_and_settings(name)
    if family != "s_family":
        return CRITERIA.get(name, _shorten_path(name))
    return f"S({','.join(values.get(key, '?') for key in ('b', 'alpha', 'beta'))})"


def _shorten_path(text: str) -> str:
    """`file(path=/a/b/c.csv)` becomes `file(b/c.csv)`: a criterion or an allocation of a study's
    record, with the last two parts of a path."""
    return re.sub(r"path=[^,]*?([^/,]+(?:/[^/,]+)?)(?=,|\)?$)", r"\1", text)


def name_and_settings(text: str) -> tuple[str, dict[str, str]]:
    """Parse `text`, a criterion or an allocation as written in a study's record.

    `coverage, prior usage` and `coverage(prior=usage)` both give ("coverage", {"prior": "usage"}).
    A setting without a value, as in `coverage, aligned`, has the value "".
    """
    match = _NAME_AND_SETTINGS.fullmatch(text)
    if match is None:
        return text, {}
    settings = {}
    for part in f"{match['in_parentheses'] or ''},{match['after_comma'] or ''}".split(","):
        # labels of presets have a space in place of the sign =
        key, _, value = part.strip().partition("=" if "=" in part else " ")
        settings[key] = value
    settings.pop("", None)  # empty parts are no settings
    return match["name"], settings


def split_top_k(model: str) -> tuple[str, int | None]:
    """Split a model's name into the name of the trained model and the number of experts per token:
    qwen_top2 becomes (qwen, 2), and qwen becomes (qwen, None)."""
    match = _TOP_K_MODEL.fullmatch(model)
    return (match["trained"], int(match["top_k"])) if match else (model, None)


def method_key(criterion_name: str, allocation: str = "", recovery: str = "") -> str:
    """The key by which tables identify a method. A part that is "" is left out."""
    return _SEPARATOR.join((criterion_name, allocation, recovery)).rstrip(_SEPARATOR)


def method_parts(method_key: str) -> tuple[str, str, str]:
    """(criterion, allocation, recovery) of a method's key; "" for a part that the key lacks."""
    # two more separators, so that a key with fewer parts also splits into at least three texts
    criterion_name, allocation, recovery = (method_key + 2 * _SEPARATOR).split(_SEPARATOR)[:3]
    return criterion_name, allocation, recovery


def method(method_key: str) -> str:
    """Display name of a method: `REAP`; `REAP, evolutionary`."""
    criterion_name, allocation, recovery = method_parts(method_key)
    name = METHODS.get((criterion_name, allocation)) or comma_joined(
        criterion(criterion_name), allocation_name(allocation)
    )
    return comma_joined(name, recovery_name(recovery))


def allocation_name(allocation: str) -> str:
    """Display name of an allocation: `U-shaped`. The name of a replacement comes before the
    allocation: `M-SMoE, global by frequency`."""
    kind, replacement = split_replacement(allocation)
    replacement_name = REPLACEMENTS.get(replacement, replacement)
    if replacement and kind == "uniform":
        return replacement_name
    if "path=" not in kind:
        kind = ALLOCATIONS.get(kind, kind.replace("_", " "))
    return comma_joined(replacement_name, _shorten_path(kind))


def split_replacement(allocation: str) -> tuple[str, str]:
    """Split an allocation of `Study.cells` into the allocation without the replacement, and the
    replacement: `uniform, replacement=ream` becomes (uniform, ream)."""
    match = _REPLACEMENT.search(allocation)
    return (allocation.replace(match[0], ""), match[1]) if match else (allocation, "")


def recovery_name(recovery: str) -> str:
    """Display name of a recovery; "" for a cell without recovery."""
    return RECOVERIES.get(recovery, recovery)


def methods_in_order(keys: Iterable[str]) -> list[str]:
    """Sort the distinct keys of methods by criterion, replacement, allocation and recovery. Each
    part is in the order of its dictionary of display names, such as CRITERIA. Names that the
    dictionary lacks come last, alphabetically."""
    orders = [list(CRITERIA), list(REPLACEMENTS), ["", *ALLOCATIONS], ["", *RECOVERIES]]

    def sort_key(method_key: str) -> list[tuple[int, str]]:
        """`_position` of each part of a method."""
        criterion_name, allocation, recovery = method_parts(method_key)
        kind, replacement = split_replacement(allocation)
        return list(map(_position, (criterion_name, replacement, kind, recovery), orders))

    return sorted(set(keys), key=sort_key)


def _position(value: str, order: list[str]) -> tuple[int, str]:
    """A key that sorts values as they are listed in `order`; values that `order` lacks come last,
    alphabetically."""
    return order.index(value) if value in order else len(order), value


def benchmark(name: str) -> str:
    """Display name of a benchmark, as the papers spell it."""
    return BENCHMARKS.get(name, name)


def calibration(name: str) -> str:
    """Display name of a calibration set: pocket_code becomes Code."""
    if name == "none":
        return "no data"
    if JOINT in name:
        return f" {JOINT} ".join(map(calibration, name.split(JOINT)))
    if name.startswith("pocket_"):
        return capitalised(name.removeprefix("pocket_").replace("_", " "))
    return name


def domain(calibration_set: str) -> str | None:
    """The domain in DOMAINS to which a calibration set belongs by its name. None for a name without
    domain, and for one with several, as that of a mix."""
    lowercase_name = calibration_set.lower()
    domains = [
        domain for domain, parts in DOMAINS.items() if any(part in lowercase_name for part in parts)
    ]
    return domains[0] if len(domains) == 1 else None


def domain_of_benchmark(benchmark: str) -> str:
    """The domain in DOMAINS to which a benchmark belongs."""
    for domain, benchmarks in _BENCHMARKS_OF_DOMAIN.items():
        if benchmark in benchmarks:
            return domain
    return "general"


def ratio(value: float) -> str:
    """Format a ratio as per cent with its decimals: 0.125 becomes 12.5 %."""
    return f"{value * 100:g} %"


def in_order(values: Iterable[str], order: Iterable[str]) -> list[str]:
    """Sort the different `values` as they are listed in `order`; values that `order` lacks come
    last, alphabetically."""
    listed = list(order)
    return sorted(set(values), key=lambda value: _position(value, listed))


def calibrations_in_order(values: Iterable[str]) -> list[str]:
    """Sort the different calibration sets as the papers list their domains, then alphabetically."""
    domains = [*DOMAINS, None]  # None: a name without one domain
    return sorted(set(values), key=lambda value: (domains.index(domain(value)), value))


def limits(numbers: pd.Series, form: str) -> str:
    """The least and the greatest number in the format `form`: `5 to 10`; one of them if both are
    printed alike."""
    return " to ".join(dict.fromkeys(map(form.format, (numbers.min(), numbers.max()))))


def comma_joined(*texts: str) -> str:
    """The texts joined by commas. Empty texts are left out."""
    return ", ".join(filter(None, texts))


def enumeration(texts: Iterable[str]) -> str:
    """Join texts as an enumeration: `a, b and c`."""
    items = list(texts)
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"
