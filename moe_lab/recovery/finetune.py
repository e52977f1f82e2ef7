"""Fine-tune a pruned model, and save its changed tensors.

It learns the answers of an instruction set, or, on any text, the next-token distributions of the
unpruned model. The seed fixes the order of rows. A stopped training resumes exactly from a
checkpoint.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, pad
from torch.nn.utils import parametrize

from moe_lab import progress
from moe_lab.calibration.batches import answer_batches, batches
from moe_lab.config import CalibrationConfig, RecoveryConfig
from moe_lab.errors import UserError
from moe_lab.models.discover import routed_layers
from moe_lab.models.experts import wide
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import share_copy
from moe_lab.recovery.apply import pruned, save_tuned
from moe_lab.recovery.dora import attach, merge, router_weight, trainable
from moe_lab.statistics.observe import digest

RATES = {
    "experts": "learning_rate",
    "shared_experts": "learning_rate",
    "routers": "router_learning_rate",
}
"""Part of the model -> the setting that holds its peak learning rate."""
Row = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""ids (S,) int64, valid (S,) bool, learnt (S,) bool: the tokens, which of them count, which of them
are learnt."""
Groups = dict[str, dict[str, nn.Parameter]]
"""Part of the model (experts, routers, shared_experts) -> name -> parameter to train; names are the
same in every run."""
Loss = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(model, ids (B, S), valid (B, S), learnt (B, S)) -> the loss summed over the learnt tokens, in
nats."""
WARMUP = 0.1
"""Share of the steps in which learning rates rise from 0 to their peak: before, AdamW knows too few
gradients to scale them."""
CLIP = 0.5
"""Largest norm of the gradient of one step, so that no single step undoes many."""
SAVE_EVERY = 50
"""Steps between two checkpoints: a killed run loses minutes, and writing them takes a few percent
of its time."""
PROGRESS_FILE = "progress.pt"


def finetune(
    model: Any,
    tokenizer: Any,
    plan: Plan | None,
    settings: RecoveryConfig,
    text: CalibrationConfig,
    *,
    out: Path,
    partial: Path,
    seed: int,
) -> None:
    """Train `model`, pruned by `plan` (None: not pruned): DoRA adapters on its MoE blocks, or its
    routers alone.

    It learns the answers of `text` or, with recovery.distill, what the unpruned `model` predicts on
    `text`. Files written to the folder `out`, from which `apply.recovered` makes the fine-tuned
    model:

    tuned.safetensors  tensors that differ from the pruned model's, by names in its state dict
    finetune.json      loss of each step, trained parameters, tokens, steps, seconds

    Progress is saved in `partial`, a folder of this run alone, which resumes from it exactly.
    `model` is not changed. UserError for a text in which nothing can be learnt, and a loss that is
    not finite.
    """
    is_distilled = settings.distill is not None
    rows = text_rows(text, tokenizer) if is_distilled else answer_rows(text, tokenizer)
    distillation = functools.partial(
        distillation_loss, teacher=model, temperature=settings.temperature
    )
    loss = distillation if is_distilled else answer_loss
    run: dict[str, Any] = {"loss": loss, "partial": partial, "seed": seed}
    started = time.monotonic()
    with student(model, plan, settings, seed) as trained:
        losses = train(
            trained.model, trained.parameters, rows, settings, rows_at_once=text.batch_size, **run
        )
        counts = {
            part: sum(map(torch.numel, named.values()))
            for part, named in trained.parameters.items()
        }
        changed = trained.changed()
    report = {
        "trained_parameters": counts,
        "rows": len(rows),
        "tokens" if is_distilled else "answer_tokens": sum(
            int(learnt[1:].sum()) for _, _, learnt in rows
        ),
        "steps": len(losses),
        "seconds": round(time.monotonic() - started, 1),
        "loss": losses,
    }
    save_tuned(out, changed, report)


def answer_rows(text: CalibrationConfig, tokenizer: Any) -> list[Row]:
    """The rows of an instruction set in which an answer is learnt. UserError when there are
    none."""
    reason = "no row holds an answer after its first token: expected answers"
    return _learnable(answer_batches(text, tokenizer, header=True), text, reason)


def text_rows(text: CalibrationConfig, tokenizer: Any) -> list[Row]:
    """The rows of any text; each valid token that follows a valid one is learnt. UserError when
    there is none."""
    read = batches(text, tokenizer).rows
    marked = ((ids, valid, valid & pad(valid[:, :-1], (1, 0), value=True)) for ids, valid in read)
    return _learnable(marked, text, "no token follows another one: expected longer documents")


def _learnable(
    marked: Iterable[Sequence[torch.Tensor]], text: CalibrationConfig, reason: str
) -> list[Row]:
    """The rows of batches in which a token after the first is learnt."""
    rows = [
        (*row,) for batch in marked for row in zip(*batch, strict=True) if bool(row[2][1:].any())
    ]
    if not rows:
        raise UserError(f"calibration.path={text.path}: {reason}")
    return rows


def train(
    model: Any,
    groups: Groups,
    rows: Sequence[Row],
    settings: RecoveryConfig,
    *,
    loss: Loss,
    rows_at_once: int,
    partial: Path,
    seed: int,
) -> list[float]:
    """Train the parameters `groups` of `model` on `rows`; returns the loss of each step, in nats
    per learnt token. AdamW without weight decay. A step reads `settings.rows_per_step` rows,
    `rows_at_once` in one forward pass; its loss is the mean over all their learnt tokens. All
    random numbers of a step are drawn from (seed, step), so a training that is resumed from
    `partial` gives exactly the weights of an uninterrupted one."""
    parameters = {name: parameter for named in groups.values() for name, parameter in named.items()}
    parts = [part for part in groups if groups[part]]
    trained = [{"params": list(groups[part].values())} for part in parts]
    optimizer = torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0)
    steps = step_count(settings, len(rows))
    content = digest(tensor for row in rows for tensor in row)
    identity = json.dumps(
        {"settings": settings.identity, "seed": seed, "rows": content}, sort_keys=True
    )
    losses = load_progress(partial, identity, parameters, optimizer)
    for step in range(len(losses), steps):
        chosen = [rows[row] for row in rows_of_step(step, settings.rows_per_step, len(rows), seed)]
        for part, group in zip(parts, optimizer.param_groups, strict=True):
            group["lr"] = getattr(settings, RATES[part]) * rate_factor(step, steps)
        with torch.random.fork_rng():
            torch.manual_seed(_mixed(seed, step))
            losses.append(_backward(model, chosen, loss, rows_at_once))
        if not math.isfinite(losses[-1]):
            rate = f"recovery.{RATES[parts[0]]}={getattr(settings, RATES[parts[0]])}"
            raise UserError(
                f"fine-tuning: the loss of step {step + 1} is {losses[-1]}, expected a number: "
                f"lower {rate}"
            )
        torch.nn.utils.clip_grad_norm_(parameters.values(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress.update(step + 1, steps, "steps")
        if (step + 1) % SAVE_EVERY == 0 and step + 1 < steps:
            trained_so_far = {name: parameter.detach() for name, parameter in parameters.items()}
            saved = {"about": identity, "losses": losses, "parameters": trained_so_far}
            save_progress(partial, {**saved, "optimizer": optimizer.state_dict()})
    return losses


def step_count(settings: RecoveryConfig, n_rows: int) -> int:
    """Steps of `settings.epochs` passes over `n_rows` rows; the last may begin another pass. At
    least 1."""
    return max(1, math.ceil(settings.epochs * n_rows / settings.rows_per_step))


def rate_factor(step: int, steps: int) -> float:
    """Share of the peak learning rate in `step` (from 0) of `steps`: a linear rise over the first
    `WARMUP` of them, then a cosine, to 0 after the last one."""
    rising = math.ceil(WARMUP * steps)
    if step < rising:
        return (step + 1) / rising
    done = (step - rising) / max(1, steps - rising)
    return 0.5 * (1 + math.cos(math.pi * done))


def rows_of_step(step: int, size: int, n_rows: int, seed: int) -> list[int]:
    """Indices of the rows of one step. Each pass over all rows has an order of its own, drawn from
    the seed."""
    chosen = []
    for at in range(step * size, (step + 1) * size):
        turn, place = divmod(at, n_rows)
        generator = torch.Generator().manual_seed(_mixed(seed, -1 - turn))
        chosen.append(int(torch.randperm(n_rows, generator=generator)[place]))
    return chosen


def _backward(model: Any, rows: Sequence[Row], loss: Loss, at_once: int) -> float:
    """Add the gradients of the mean loss over the learnt tokens of `rows`; returns that loss."""
    tokens = sum(int(learnt[1:].sum()) for _, _, learnt in rows)
    total = 0.0
    for start in range(0, len(rows), at_once):
        mean = loss(model, *_stacked(rows[start : start + at_once], model.device)) / tokens
        mean.backward()
        total += float(mean.detach())
    return total


def answer_loss(
    model: Any, ids: torch.Tensor, valid: torch.Tensor, answers: torch.Tensor
) -> torch.Tensor:
    """Sum over the answer tokens (B, S), but for the first of a row, of -log p(token | tokens
    before it), in fp32."""
    logits = _predictions(model, ids, valid, answers)
    return cross_entropy(logits.float(), ids[:, 1:][answers[:, 1:]], reduction="sum")


def distillation_loss(
    model: Any,
    ids: torch.Tensor,
    valid: torch.Tensor,
    learnt: torch.Tensor,
    *,
    teacher: Any,
    temperature: float,
) -> torch.Tensor:
    """Sum over the learnt tokens (B, S) of tau^2 KL(teacher || student), in fp32. Both are
    next-token distributions over the whole vocabulary, at the temperature tau. Divided by the
    number of learnt tokens it is the loss of Router-KD (arXiv 2603.02217, equations 1 to 3). No
    gradient flows into the teacher."""
    with torch.no_grad():
        target = log_softmax(_predictions(teacher, ids, valid, learnt).float() / temperature, -1)
    predicted = log_softmax(_predictions(model, ids, valid, learnt).float() / temperature, -1)
    return temperature**2 * kl_div(predicted, target, reduction="sum", log_target=True)


def _predictions(
    model: Any, ids: torch.Tensor, valid: torch.Tensor, learnt: torch.Tensor
) -> torch.Tensor:
    """The logits (N, V) from which the N learnt tokens (B, S) are predicted."""
    after = learnt[:, 1:]
    columns = after.any(0).nonzero()[:, 0]  # of which logits are computed in all rows
    mask = None if bool(valid.all()) else valid.to(torch.int64)
    logits: torch.Tensor = model(
        input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=columns
    ).logits
    return logits[after[:, columns]]


def _stacked(rows: Sequence[Row], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Rows as one batch (B, S), without the columns on the right in which no row has a token."""
    ids, valid, learnt = (torch.stack(tensors) for tensors in zip(*rows, strict=True))
    end = int(valid.any(0).nonzero().max()) + 1
    return tuple(tensor[:, :end].to(device) for tensor in (ids, valid, learnt))


def _mixed(seed: int, step: int) -> int:
    """Derive the seed of one step from that of the training; hashing keeps the seeds of different
    steps unrelated."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step}".encode()).digest()[:7], "big")


def save_progress(folder: Path, content: Mapping[str, Any]) -> None:
    """Save what `load_progress` reads atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary_file = folder / f"{PROGRESS_FILE}.part"
    torch.save(content, temporary_file)
    temporary_file.replace(folder / PROGRESS_FILE)


def load_progress(
    folder: Path,
    identity: str,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> list[float]:
    """Restore trained parameters and optimiser; returns the losses of the finished steps, or [],
    with nothing changed, when the file is missing, damaged, or of another training."""
    try:
        content = torch.load(folder / PROGRESS_FILE, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, UnpicklingError):
        return []
    if content["about"] != identity:
        return []
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(content["parameters"][name])
    optimizer.load_state_dict(content["optimizer"])
    losses: list[float] = content["losses"]
    return losses


# Trained models: DoRA adapters on the MoE blocks of a copy, or the routers of a masked model.


@dataclass(frozen=True)
class Student:
    """A pruned model, and what of it is trained."""

    model: Any
    parameters: Groups
    changed: Callable[[], dict[str, torch.Tensor]]
    """Ends the training and returns the tensors it changed, by their names in the pruned model's
    state dict."""


@contextmanager
def student(
    model: Any, plan: Plan | None, settings: RecoveryConfig, seed: int
) -> Iterator[Student]:
    """`model`, pruned by `plan` (None: not pruned), ready for what `settings` train. `model` itself
    is not changed."""
    if settings.train == "routers":
        with trained_routers(model, plan) as trained:
            yield trained
    else:
        copy = pruned(model, plan)
        adapted = attach(copy, settings, seed)
        yield Student(copy, trainable(adapted), functools.partial(merge, copy, adapted))


@contextmanager
def trained_routers(model: Any, plan: Plan | None) -> Iterator[Student]:
    """`model` under the mask of `plan`, with the routers' weights as parameters and everything else
    frozen. The student shares all other tensors with `model`, so that a teacher costs no memory.
    Only the rows of retained experts are trained; correction biases, and biases of routers, stay.
    Weights of 16 bits are trained as fp32 copies, since rounding would lose small steps, and are
    rounded in each forward pass as they will be when evaluated."""
    masked = share_copy(model)
    masked.requires_grad_(False)
    owners = {layer.index: router_weight(layer) for layer in routed_layers(masked)}
    paths = {module: path for path, module in masked.named_modules()}
    with ExitStack() as undo:
        if plan is not None:
            undo.enter_context(mask(masked, plan))
        weights = {}
        for layer, owner in owners.items():
            weights[layer] = PreciseWeight(owner.weight)  # type: ignore[arg-type]
            parametrize.register_parametrization(owner, "weight", weights[layer], unsafe=True)
            # before the mask closes, which puts the whole weight back in place of the slice
            undo.callback(
                parametrize.remove_parametrizations, owner, "weight", leave_parametrized=False
            )

        def changed() -> dict[str, torch.Tensor]:
            return {f"{paths[owner]}.weight": owner.weight.detach() for owner in owners.values()}  # type: ignore[operator]

        parameters = {
            f"routers.{layer}.weight": weight.precise for layer, weight in weights.items()
        }
        yield Student(masked, {"routers": parameters}, changed)


class PreciseWeight(nn.Module):
    """Parametrises a weight by a trained copy in at least fp32."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.precise = nn.Parameter(wide(weight.detach()).clone())

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The trained copy, rounded to the dtype of `weight`."""
        return self.precise.to(weight.dtype)
