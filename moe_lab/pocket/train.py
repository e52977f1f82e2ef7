"""Trains the pocket model: `python -m moe_lab.pocket.train`. Half an hour to an hour on one CPU thread."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers

from moe_lab.pocket.batches import Batch, batch
from moe_lab.pocket.corpus import documents
from moe_lab.pocket.examples import Example
from moe_lab.pocket.network import BALANCE, balance_loss, build_network, token_loss
from moe_lab.pocket.tokens import build_tokenizer
from moe_lab.pocket.world import WORLD_SEED, build_world

OUTPUT = Path(__file__).parent / "data" / "olmoe"
TOKENIZER_DOCUMENTS = 20_000
# Mostly short rows whose documents do not see each other, as a benchmark shows them; every fourth step has rows as long
# as calibration uses, whose documents do see the ones before.
SHORT, LONG = (32, 128), (8, 512)
SHAPES = (LONG, SHORT, SHORT, SHORT)


@dataclass(frozen=True)
class TrainingSettings:
    """One training run; the defaults are the shipped one's."""

    steps: int = 3200
    learning_rate: float = 3e-3
    warmup: int = 100
    weight_decay: float = 0.1
    seed: int = 1
    threads: int = 1
    save_every: int = 500


def learning_rate_factor(step: int, settings: TrainingSettings) -> float:
    """Linear warm-up, then a cosine down to 2 % of the peak."""
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))


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


def describe(settings: TrainingSettings, model: Any, losses: list[float], tally: Counter[str]) -> dict[str, Any]:
    """What a model card has to say about the run."""
    recent = losses[-100:]
    return {
        "settings": asdict(settings),
        "world_seed": WORLD_SEED,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": len(losses),
        "tokens": sum(math.prod(SHAPES[step % len(SHAPES)]) for step in range(1, len(losses) + 1)),
        "documents": dict(sorted(tally.items())),
        "final_loss": round(sum(recent) / len(recent), 4),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def train(settings: TrainingSettings, folder: Path) -> None:
    """Builds tokenizer and network, trains, and leaves the model in `folder` (also every `save_every` steps)."""
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    world = build_world()
    tokenizer = build_tokenizer(
        example.text for example in islice(documents(world, settings.seed), TOKENIZER_DOCUMENTS)
    )
    model = build_network(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, settings))
    tally: Counter[str] = Counter()
    stream = counted(documents(world, settings.seed), tally)
    losses: list[float] = []
    started = time.time()
    for step in range(1, settings.steps + 1):
        shape = SHAPES[step % len(SHAPES)]
        loss, balance = train_step(model, optimizer, batch(stream, tokenizer, *shape), separate=shape == SHORT)
        schedule.step()
        losses.append(loss)
        if step % 25 == 0:
            print(f"step {step} loss {loss:.3f} balance {balance:.2f} seconds {time.time() - started:.0f}", flush=True)
        if step % settings.save_every == 0 or step == settings.steps:
            facts = describe(settings, model, losses, tally) | {"seconds": round(time.time() - started)}
            save(model, tokenizer, facts, folder)


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parser = argparse.ArgumentParser(description=__doc__)
    defaults = TrainingSettings()
    for name, value in asdict(defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = vars(parser.parse_args())
    folder = arguments.pop("output")
    train(TrainingSettings(**arguments), folder)


if __name__ == "__main__":
    main()
