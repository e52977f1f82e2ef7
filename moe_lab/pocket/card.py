"""The model card: `python -m moe_lab.pocket.card SCORES.json` writes README.md beside the model, figures from files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_lab.pocket.train import OUTPUT

# Share of right answers from guessing, for those benchmarks where guessing is possible.
CHANCE = {
    "ARC-C": 0.25, "ARC-E": 0.25, "HellaSwag": 0.25, "MMLU": 0.25, "OBQA": 0.25,
    "BoolQ": 0.5, "RTE": 0.5, "WinoGrande": 0.5,
}  # fmt: skip

INTRODUCTION = """\
---
license: apache-2.0
library_name: transformers
---
# Pocket OLMoE

A small mixture-of-experts language model trained from scratch on a generated closed world: people, towns, jobs,
animals and objects, stories about them, arithmetic, and small Python functions. It exists so that methods which prune
experts can be tried, tested and compared in seconds on a CPU. It knows nothing about the real world, and its text is of
no other use.

Stock `OlmoeForCausalLM` (no custom code), bfloat16 safetensors; the scores below are those of the stored weights run
in float32. `python -m moe_lab.pocket.train` trains it again. All training text is generated, none was taken from
anywhere.
"""

CAVEATS = """\
Each benchmark asks only for what the training text never contained. But training stages and two of the formats were
chosen with these very scores in view, so take them as the point pruning starts from, not as estimates for new items:

- MMLU compares the texts of the four options. Asked for the letter alone, the model stayed at chance (0.25).
- RTE can be answered from the words that introduce the premise ("It is true that", "It was a lie that"). When false
  claims had the two people swapped instead, the model stayed at chance (0.5).
- BoolQ is above chance, but far from solved: comparing two words of a text is what this model is worst at.
"""


def training_table(run: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """What was trained, and how; one column a stage for what differs between them."""
    stages = run["stages"]
    rows: dict[str, list[Any]] = {
        "steps": [f"{stage['steps']:,}" for stage in stages],
        "tokens": [f"{stage['tokens']:,}" for stage in stages],
        "documents": [f"{sum(stage['documents'].values()):,}" for stage in stages],
        "seconds": [f"{stage['seconds']:,}" for stage in stages],
        "final loss (mean of the last 100 steps, nats a weighted token)": [stage["final_loss"] for stage in stages],
    }
    shape = (
        "num_hidden_layers",
        "num_experts",
        "num_experts_per_tok",
        "hidden_size",
        "intermediate_size",
        "vocab_size",
    )
    head = "| | " + " | ".join(f"stage {number}" for number in range(1, len(stages) + 1)) + " |\n"
    lines = [f"| {name} | {' | '.join(map(str, values))} |\n" for name, values in rows.items()]
    facts = {
        "parameters": f"{run['parameters']:,}",
        ", ".join(shape): ", ".join(str(config[name]) for name in shape),
        "seed (training, world), threads": f"{run['seed']}, {run['world_seed']}, {run['threads']}",
        "versions": ", ".join(f"{name} {version}" for name, version in run["versions"].items()),
    }
    listed = "".join(f"- {name}: {value}\n" for name, value in facts.items())
    return listed + "\n" + head + "|---" * (len(stages) + 1) + "|\n" + "".join(lines)


def score_table(scores: Mapping[str, float]) -> str:
    """Scores of the unpruned model; chance where there is one."""
    head = "| benchmark | score | chance |\n|---|---|---|\n"
    return head + "".join(f"| {name} | {score:.3f} | {CHANCE.get(name, '')} |\n" for name, score in scores.items())


def write_card(folder: Path, scores: Mapping[str, float]) -> None:
    """README.md in the model folder, from its training.json and config.json and the scores {benchmark: 0..1}."""
    run = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    parts = (
        INTRODUCTION,
        "## Training run\n\n" + training_table(run, config),
        "## Scores, unpruned\n\n" + CAVEATS + "\n" + score_table(scores),
    )
    (folder / "README.md").write_text("\n".join(parts), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scores", type=Path, help="JSON object of benchmark: score")
    parser.add_argument("--model", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    write_card(arguments.model, json.loads(arguments.scores.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
