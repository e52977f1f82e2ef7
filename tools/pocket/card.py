"""The model card: `python -m tools.pocket.card NAME SCORES.json` writes README.md beside the model
of this name."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from moe_lab.errors import run_and_exit
from moe_lab.paths import DATA
from tools.pocket.recipes import RECIPES

# Benchmark -> share of right answers by guessing.
CHANCE = {
    "ARC-C": 0.25, "ARC-E": 0.25, "HellaSwag": 0.25, "MMLU": 0.25, "OBQA": 0.25,
    "BoolQ": 0.5, "RTE": 0.5, "WinoGrande": 0.5,
}  # fmt: skip

INTRODUCTION = """\
---
license: apache-2.0
library_name: transformers
---
# {title}

{about}

Stock `{architecture}` (no custom code), bfloat16 safetensors; the scores below are those of the stored weights run
in float32. `python -m tools.pocket.train {name}` trains it again. All training text is generated, none was taken from
anywhere.

{routing}
"""

ABOUT = """\
A small mixture-of-experts language model trained on nothing but {text}. It exists so that methods which prune experts \
can be tried, tested and compared in seconds on a CPU. It knows nothing about the real world, and its text is of no \
other use."""

CAVEATS_INTRODUCTION = """\
Each benchmark asks only for what the training text never contained. But training stages and two of the formats were
chosen with these very scores in view, so take them as the point pruning starts from, not as estimates for new items:

"""
# Benchmark -> what to know about the scores of the models that have one on it.
CAVEATS = {
    "MMLU": """\
- MMLU compares the texts of the four options. Asked for the letter alone, the first pocket model stayed at chance
  (0.25).
""",
    "RTE": """\
- RTE can be answered from the words that introduce the premise ("It is true that", "It was a lie that"). When false
  claims had the two people swapped instead, the first pocket model stayed at chance (0.5).
""",
    "ARC-C": """\
- BoolQ, WinoGrande and ARC-C are the hardest: these models are bad at comparing words of a text, and at asking for a
  second fact with the answer to a first. Where a score is within 0.1 of chance, pruning has nothing to lose there.
""",
    "function calls": """\
- Function calls asks for calls that no training text made, of functions that it knows. Functions, their arguments and
  the words of requests were made fewer until the model learned them in half an hour.
- An answer without a readable call is right where no function fits, so a model that writes nonsense has that share.
""",
}


def training_table(run: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    """Facts about the training run as a list, and a table of its stages with one column per
    stage."""
    stages = run["stages"]
    rows: dict[str, list[Any]] = {
        "steps": [f"{stage['steps']:,}" for stage in stages],
        "tokens": [f"{stage['tokens']:,}" for stage in stages],
        "documents": [f"{sum(stage['documents'].values()):,}" for stage in stages],
        "seconds": [f"{stage['seconds']:,}" for stage in stages],
        "final loss (mean of the last 100 steps, nats a weighted token)": [
            stage["final_loss"] for stage in stages
        ],
    }
    head = "| | " + " | ".join(f"stage {number}" for number in range(1, len(stages) + 1)) + " |\n"
    lines = [f"| {name} | {' | '.join(map(str, values))} |\n" for name, values in rows.items()]
    facts: dict[str, str] = {}
    if base := run.get("base"):
        copied = f"{run['copied_parameters']:,}"
        facts["started from"] = f"{copied} parameters of pocket {base}, the rest random"
    facts |= {
        "parameters": f"{run['parameters']:,}",
        "configuration": ", ".join(f"{name} {json.dumps(value)}" for name, value in fields.items()),
        "seed (training, world), threads": f"{run['seed']}, {run['world_seed']}, {run['threads']}",
        "versions": ", ".join(f"{name} {version}" for name, version in run["versions"].items()),
    }
    listed = "".join(f"- {name}: {value}\n" for name, value in facts.items())
    return listed + "\n" + head + "|---" * (len(stages) + 1) + "|\n" + "".join(lines)


def score_table(scores: Mapping[str, float]) -> str:
    """Table of the unpruned model's scores, and of the scores by guessing where they are known."""
    head = "| benchmark | score | chance |\n|---|---|---|\n"
    return head + "".join(
        f"| {name} | {score:.3f} | {CHANCE.get(name, '')} |\n" for name, score in scores.items()
    )


def write_card(folder: Path, name: str, scores: Mapping[str, float]) -> None:
    """Write README.md into the folder of a model that was trained by the recipe of this name.

    Figures come from the model's training.json and config.json, and from scores: benchmark -> score
    (0..1).
    """
    recipe = RECIPES[name]
    run = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    [architecture] = config["architectures"]
    about = fill(ABOUT.format(text=recipe.text), width=120, break_on_hyphens=False)
    introduction = INTRODUCTION.format(
        name=name,
        title=recipe.title,
        architecture=architecture,
        routing=recipe.routing,
        about=about,
    )
    caveats = CAVEATS_INTRODUCTION + "".join(
        text for benchmark, text in CAVEATS.items() if benchmark in scores
    )
    fields = {field: config[field] for field in [*recipe.fields, "vocab_size"] if field in config}
    parts = (
        introduction,
        "## Training run\n\n" + training_table(run, fields),
        "## Scores, unpruned\n\n" + caveats + "\n" + score_table(scores),
    )
    (folder / "README.md").write_text("\n".join(parts), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=RECIPES)
    parser.add_argument("scores", type=Path, help="JSON object of benchmark: score")
    parser.add_argument(
        "--model", type=Path, help="default: where the shipped model of this name is"
    )
    arguments = parser.parse_args()
    scores = json.loads(arguments.scores.read_text(encoding="utf-8"))
    write_card(arguments.model or DATA / arguments.name, arguments.name, scores)


if __name__ == "__main__":
    run_and_exit(main)
