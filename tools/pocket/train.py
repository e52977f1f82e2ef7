"""Trains a pocket model: `python -m tools.pocket.train NAME`. Ten minutes to an hour on one CPU
thread."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerFast

from moe_lab.errors import run_and_exit
from moe_lab.paths import DATA
from tools.pocket.corpus import documents
from tools.pocket.examples import Example
from tools.pocket.network import (
    balance_loss,
    build_network,
    copy_agreeing,
    load_network,
    move_bias,
    token_loss,
    watched_routers,
)
from tools.pocket.recipes import BALANCE, RECIPES, Recipe
from tools.pocket.tokens import Batch, batch, build_tokenizer
from tools.pocket.world import WORLD_SEED, build_world

TOKENIZER_DOCUMENTS = 20_000
WEIGHT_DECAY = 0.1


def train_step(model: Any, optimizer: Any, rows: Batch, *, separate: bool) -> tuple[float, float]:
    """Do one update; returns (token loss in nats, largest load of an expert divided by the mean
    load).

    separate: whether the documents of a row do not attend to each other. transformers concludes
    this from the position of each token in its document.
    """
    positions = rows.positions if separate else None
    with watched_routers(model) as routings:
        output = model(input_ids=rows.tokens, position_ids=positions, use_cache=False)
    loss = token_loss(output.logits, rows.tokens, rows.weights)
    balanced_by_loss = [routing for routing in routings if routing.bias is None]
    balance = sum(map(balance_loss, balanced_by_loss), torch.zeros(())) / len(routings)
    torch.autograd.backward(loss + BALANCE * balance)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for routing in routings:
        if routing.bias is not None:
            move_bias(routing.bias, routing.load)
    loads = [(routing.load / routing.load.mean()).max().item() for routing in routings]
    return loss.item(), max(loads)


def save(model: Any, tokenizer: Any, facts: dict[str, Any], folder: Path) -> None:
    """Write the model in bfloat16 as a stock Hugging Face folder, and the facts of the run as
    training.json."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = {
        name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()
    }
    copy = type(model)(model.config).to(torch.bfloat16)
    copy.load_state_dict(rounded)
    copy.generation_config.update(do_sample=False)
    copy.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n")


def counted(examples: Iterator[Example], tally: Counter[str]) -> Iterator[Example]:
    """Yield the examples and count them by skill in `tally`."""
    for example in examples:
        tally[example.skill] += 1
        yield example


def stage_facts(
    recipe: Recipe, losses: list[float], tally: Counter[str], seconds: float
) -> dict[str, Any]:
    """The facts of one stage for the model card."""
    recent = losses[-100:]
    return {
        "steps": len(losses),
        "tokens": sum(math.prod(recipe.batches.shape(step)) for step in range(1, len(losses) + 1)),
        "documents": dict(sorted(tally.items())),
        "seconds": round(seconds),
        "final_loss": round(sum(recent) / len(recent), 4),
    }


def run_stage(
    model: Any, tokenizer: Any, recipe: Recipe, number: int, stream: Iterator[Example]
) -> dict[str, Any]:
    """Train `model` in place in the recipe's stage of this number; returns the facts of the
    stage."""
    stage = recipe.stages[number]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, stage.learning_rate)
    tally: Counter[str] = Counter()
    documents_seen = counted(stream, tally)
    losses: list[float] = []
    started = time.process_time()
    for step in range(1, stage.steps + 1):
        shape = recipe.batches.shape(step)
        rows = batch(documents_seen, tokenizer, stage.loss_weights, *shape)
        loss, load = train_step(model, optimizer, rows, separate=shape == recipe.batches.short)
        schedule.step()
        losses.append(loss)
        if step % 25 == 0:
            print(
                f"step {step} loss {loss:.3f} largest load {load:.2f} seconds "
                f"{time.process_time() - started:.0f}",
                flush=True,
            )
    return stage_facts(recipe, losses, tally, time.process_time() - started)


def fresh(name: str, seed: int) -> tuple[Any, Any, dict[str, Any]]:
    """(network, tokenizer, facts) before the first step. The facts are the base model and the
    number of parameters copied from it; {} without a base."""
    recipe = RECIPES[name]
    if recipe.base is None:
        texts = islice(
            documents(build_world(), seed, recipe.stages[0].mixture), TOKENIZER_DOCUMENTS
        )
        tokenizer = build_tokenizer(example.text for example in texts)
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(DATA / recipe.base)
    tokenizer.chat_template = recipe.chat_template
    network = build_network(name, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    if recipe.base is None:
        return network, tokenizer, {}
    copied = copy_agreeing(network, load_network(DATA / recipe.base))
    return network, tokenizer, {"base": recipe.base, "copied_parameters": copied}


def start(name: str, folder: Path, seed: int, first_stage: int) -> tuple[Any, Any, dict[str, Any]]:
    """(network, tokenizer, facts) before the stage `first_stage`; `folder` has the result of the
    stages before it."""
    if first_stage == 0:
        network, tokenizer, facts = fresh(name, seed)
        return network, tokenizer, {**facts, "stages": []}
    facts = json.loads((folder / "training.json").read_text())
    facts["stages"] = facts["stages"][:first_stage]
    return load_network(folder), PreTrainedTokenizerFast.from_pretrained(folder), facts


def train(
    name: str, folder: Path, *, seed: int = 1, threads: int = 1, first_stage: int = 0
) -> None:
    """Train the stages of a recipe from `first_stage` on, and write the model into `folder` after
    each stage.

    Each stage starts from the weights as they are stored, so training that is stopped and continued
    gives the same model as training without a stop.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    world = build_world()
    recipe = RECIPES[name]
    model, tokenizer, facts = start(name, folder, seed, first_stage)
    for number in range(first_stage, len(recipe.stages)):
        stream = documents(world, seed + number, recipe.stages[number].mixture)
        stage = run_stage(model, tokenizer, recipe, number, stream)
        facts |= {
            "seed": seed,
            "world_seed": WORLD_SEED,
            "threads": threads,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "stages": [*facts["stages"], stage],
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }
        save(model, tokenizer, facts, folder)
        model = load_network(folder)


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=RECIPES)
    parser.add_argument(
        "--output", type=Path, help="default: where the shipped model of this name is"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--threads", type=int, default=1, help="another number gives slightly other weights"
    )
    parser.add_argument(
        "--first-stage",
        type=int,
        default=0,
        help="go on from the model that is in the output folder",
    )
    arguments = parser.parse_args()
    train(
        arguments.name,
        arguments.output or DATA / arguments.name,
        seed=arguments.seed,
        threads=arguments.threads,
        first_stage=arguments.first_stage,
    )


if __name__ == "__main__":
    run_and_exit(main)
