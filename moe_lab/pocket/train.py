"""Trains the pocket model: `python -m moe_lab.pocket.train`. Half an hour to an hour on one CPU thread."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerFast

from moe_lab.pocket.batches import Batch, LossWeights, batch
from moe_lab.pocket.corpus import JUDGING, KNOWING, MATCHING, MATCHING_MORE, READING, documents
from moe_lab.pocket.examples import Example
from moe_lab.pocket.network import BALANCE, balance_loss, build_network, load_network, token_loss
from moe_lab.pocket.tokens import build_tokenizer
from moe_lab.pocket.world import WORLD_SEED, build_world

OUTPUT = Path(__file__).parent / "data" / "olmoe"
TOKENIZER_DOCUMENTS = 20_000
WEIGHT_DECAY = 0.1
# Mostly short rows whose documents do not see each other, as a benchmark shows them; every fourth step has rows as long
# as calibration uses, whose documents do see the ones before.
SHORT, LONG = (32, 128), (8, 512)
SHAPES = (LONG, SHORT, SHORT, SHORT)


@dataclass(frozen=True)
class Stage:
    """One stretch of training, with an optimizer of its own.

    The learning rate rises over `warmup` steps to `peak` and follows a cosine that would reach 2 % of it after
    `horizon` steps; the stage ends after `steps`.
    """

    mixture: dict[str, int]
    steps: int
    horizon: int
    peak: float
    warmup: int
    loss_weights: LossWeights

    def learning_rate(self, step: int) -> float:
        """For the step of this number, from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.horizon - self.warmup)
        return self.peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


STAGES = (
    Stage(KNOWING, 1500, 3200, 3e-3, 100, LossWeights(prompt=0.25, short_answer=4.0)),
    Stage(READING, 1500, 1500, 2e-3, 50, LossWeights(prompt=0.1, short_answer=8.0)),
    Stage(MATCHING, 900, 900, 2e-3, 50, LossWeights(prompt=0.1, short_answer=4.0)),
    Stage(MATCHING_MORE, 560, 560, 2e-3, 50, LossWeights(prompt=0.05, short_answer=8.0)),
    Stage(JUDGING, 400, 400, 8e-4, 30, LossWeights(prompt=0.05, short_answer=8.0)),
)


def train_step(model: Any, optimizer: Any, rows: Batch, *, separate: bool) -> tuple[float, float]:
    """One update. Returns the token loss in nats and the balance loss.

    `separate` gives the model each token's position in its document, from which transformers concludes that the
    documents of a row must not attend to one another.
    """
    positions = rows.positions if separate else None
    output = model(input_ids=rows.tokens, position_ids=positions, output_router_logits=True, use_cache=False)
    loss = token_loss(output.logits, rows.tokens, rows.weights)
    balance = balance_loss(output.router_logits, model.config.num_experts_per_tok)
    torch.autograd.backward(loss + BALANCE * balance)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item(), balance.item()


def save(model: Any, tokenizer: Any, facts: dict[str, Any], folder: Path) -> None:
    """Writes the stock Hugging Face folder in bfloat16, and the facts of the run beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    copy = type(model)(model.config).to(torch.bfloat16)
    copy.load_state_dict(rounded)
    copy.generation_config.update(do_sample=False)
    copy.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n")


def counted(examples: Iterator[Example], tally: Counter[str]) -> Iterator[Example]:
    """Passes examples on and counts them by skill."""
    for example in examples:
        tally[example.skill] += 1
        yield example


def stage_facts(losses: list[float], tally: Counter[str], seconds: float) -> dict[str, Any]:
    """What a model card has to say about one stage."""
    recent = losses[-100:]
    return {
        "steps": len(losses),
        "tokens": sum(math.prod(SHAPES[step % len(SHAPES)]) for step in range(1, len(losses) + 1)),
        "documents": dict(sorted(tally.items())),
        "seconds": round(seconds),
        "final_loss": round(sum(recent) / len(recent), 4),
    }


def run_stage(model: Any, tokenizer: Any, stage: Stage, stream: Iterator[Example]) -> dict[str, Any]:
    """Trains `model` in place for one stage."""
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, stage.learning_rate)
    tally: Counter[str] = Counter()
    documents_seen = counted(stream, tally)
    losses: list[float] = []
    started = time.time()
    for step in range(1, stage.steps + 1):
        shape = SHAPES[step % len(SHAPES)]
        rows = batch(documents_seen, tokenizer, stage.loss_weights, *shape)
        loss, balance = train_step(model, optimizer, rows, separate=shape == SHORT)
        schedule.step()
        losses.append(loss)
        if step % 25 == 0:
            print(f"step {step} loss {loss:.3f} balance {balance:.2f} seconds {time.time() - started:.0f}", flush=True)
    return stage_facts(losses, tally, time.time() - started)


def start(folder: Path, seed: int, first_stage: int) -> tuple[Any, Any, list[dict[str, Any]]]:
    """Network, tokenizer and the facts of the stages before `first_stage`, which `folder` holds the result of."""
    if first_stage > 0:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        done = json.loads((folder / "training.json").read_text())["stages"][:first_stage]
        return load_network(folder), tokenizer, done
    texts = islice(documents(build_world(), seed, STAGES[0].mixture), TOKENIZER_DOCUMENTS)
    tokenizer = build_tokenizer(example.text for example in texts)
    return build_network(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id), tokenizer, []


def train(
    folder: Path, stages: Sequence[Stage] = STAGES, *, seed: int = 1, threads: int = 1, first_stage: int = 0
) -> None:
    """Trains all stages from `first_stage` on and leaves the model in `folder` after each.

    Each stage starts from the weights as they are stored, so going on from a folder gives the model that not stopping
    would have given.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    world = build_world()
    model, tokenizer, done = start(folder, seed, first_stage)
    for number, stage in enumerate(stages[first_stage:], start=first_stage):
        done.append(run_stage(model, tokenizer, stage, documents(world, seed + number, stage.mixture)))
        facts = {
            "seed": seed,
            "world_seed": WORLD_SEED,
            "threads": threads,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "stages": done,
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
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="another number gives slightly other weights")
    parser.add_argument("--first-stage", type=int, default=0, help="go on from the model that is in the output folder")
    given = parser.parse_args()
    train(given.output, seed=given.seed, threads=given.threads, first_stage=given.first_stage)


if __name__ == "__main__":
    main()
