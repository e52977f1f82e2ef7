"""Fine-tune a pruned model, and save its changed tensors.

The model learns the answers of an instruction set, or the next-token distributions of the unpruned
model on any text.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
from moe_lab.models.experts import to_device
from moe_lab.models.load import backward
from moe_lab.models.rows import at_least_fp32
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune, share_copy
from moe_lab.recovery.apply import save_tuned
from moe_lab.recovery.dora import attach, merge, router_weight, trainable

RATES = {
    "experts": "learning_rate",
    "shared_experts": "learning_rate",
    "routers": "router_learning_rate",
}
"""Part of the model -> name of the setting with the part's peak learning rate."""
Row = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(ids (S,) int64, valid (S,) bool, learnt (S,) bool). valid is False at gaps and padding. learnt
is True at the tokens that the model learns to predict."""
Groups = dict[str, dict[str, nn.Parameter]]
"""Part of the model (experts, routers, shared_experts) -> name -> parameter to train. Names are the
same in every run."""
Loss = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Function (model, ids (B, S), valid (B, S), learnt (B, S)) that returns the sum of the loss over
the learnt tokens, in nats."""
WARMUP = 0.1
"""Share of the steps, at the beginning, in which learning rates rise to their peak."""
CLIP = 0.5
"""Gradients of a step with a larger norm are scaled down to this norm."""
SAVE_EVERY = 50
"""Number of steps between two checkpoints. Writing them takes a few percent of a run's time."""
PROGRESS_FILE = "progress.pt"


def finetune(
    model: Any,
    tokenizer: Any,
    plan: Plan,
    settings: RecoveryConfig,
    text: CalibrationConfig,
    *,
    out: Path,
    partial: Path,
    seed: int,
) -> None:
    """Prune a copy of `model` by `plan`, and train the copy on `text`.

    With recovery.distill, the copy learns the next-token distributions of the unpruned `model`,
    otherwise the answers in `text`. The folder `out` gets two files:

    tuned.safetensors  name in the pruned model's state dict -> tensor, for the changed tensors
    finetune.json      loss of each step; numbers of trained parameters, rows and learnt tokens

    A stopped run resumes from the checkpoint in the folder `partial`; no other run may use this
    folder. UserError when `text` has no token to learn, and for a loss that is not finite.
    """
    is_distilled = settings.distill is not None
    rows = rows_to_learn(text, tokenizer, answers=not is_distilled)
    distillation = functools.partial(
        distillation_loss, teacher=model, temperature=settings.temperature
    )
    with student(model, plan, settings, seed) as learner:
        losses = train(
            learner.model,
            learner.parameters,
            rows,
            settings,
            loss=distillation if is_distilled else answer_loss,
            rows_at_once=text.batch_rows,
            partial=partial,
            seed=seed,
        )
        counts = {
            part: sum(map(torch.numel, parameters.values()))
            for part, parameters in learner.parameters.items()
        }
        tuned_tensors = learner.finish()
    # the first token of a row has no prediction
    tokens = sum(int(learnt[1:].sum()) for _, _, learnt in rows)
    report = {
        "trained_parameters": counts,
        "rows": len(rows),
        "tokens": tokens,
        "loss": losses,
    }
    save_tuned(out, tuned_tensors, report)


def rows_to_learn(text: CalibrationConfig, tokenizer: Any, *, answers: bool) -> list[Row]:
    """The rows of a text with a learnt token after their first token. The model learns the tokens
    of `answers` in an instruction set; otherwise each valid token that follows a valid token.
    UserError when no row has such a token."""
    if answers:
        # with `header`, the text that the chat template writes around an answer is learnt, too
        marked_batches = answer_batches(text, tokenizer, header=True)
        reason = "no row holds an answer after its first token: expected answers"
    else:
        marked_batches = []
        for ids, valid in batches(text, tokenizer).batches:
            # the first column has no effect, because the first token of a row is never learnt
            follows_valid = pad(valid[:, :-1], (1, 0), value=True)
            marked_batches.append((ids, valid, valid & follows_valid))
        reason = "no token follows another one: expected longer documents"
    rows: list[Row] = []
    for batch in marked_batches:
        for ids, valid, learnt in zip(*batch, strict=True):
            if bool(learnt[1:].any()):
                rows.append((ids, valid, learnt))
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
    """Train the parameters of `model` in `groups` on `rows`, by AdamW without weight decay. Returns
    the loss of each step, in nats per learnt token.

    A step reads `settings.rows_per_step` rows, with `rows_at_once` rows in each forward pass. A
    training that resumes from the checkpoint in the folder `partial` gives exactly the weights of
    an uninterrupted training. UserError for a loss that is not finite.
    """
    parameters = {name: parameter for group in groups.values() for name, parameter in group.items()}
    trained_parts = [part for part in groups if groups[part]]
    # the learning rates are set before each step
    optimizer = torch.optim.AdamW(
        [{"params": list(groups[part].values())} for part in trained_parts],
        lr=0.0,
        weight_decay=0.0,
    )
    steps = step_count(settings, len(rows))
    losses = load_progress(partial, parameters, optimizer)
    for step in range(len(losses), steps):
        indices = rows_of_step(step, settings.rows_per_step, len(rows), seed)
        for part, options in zip(trained_parts, optimizer.param_groups, strict=True):
            options["lr"] = getattr(settings, RATES[part]) * rate_factor(step, steps)
        with torch.random.fork_rng():
            torch.manual_seed(_derive_seed(seed, step))
            losses.append(_backward(model, [rows[index] for index in indices], loss, rows_at_once))
        if not math.isfinite(losses[-1]):
            rate = RATES[trained_parts[0]]  # one of the rates
            raise UserError(
                f"fine-tuning: the loss of step {step + 1} is {losses[-1]}, expected a number: "
                f"lower recovery.{rate}={getattr(settings, rate)}"
            )
        torch.nn.utils.clip_grad_norm_(parameters.values(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress.update(step + 1, steps, "steps")
        if (step + 1) % SAVE_EVERY == 0 and step + 1 < steps:
            values = {name: parameter.detach() for name, parameter in parameters.items()}
            state = optimizer.state_dict()
            save_progress(partial, {"losses": losses, "parameters": values, "optimizer": state})
    return losses


def step_count(settings: RecoveryConfig, n_rows: int) -> int:
    """Number of steps for `settings.epochs` passes over `n_rows` rows."""
    return max(1, math.ceil(settings.epochs * n_rows / settings.rows_per_step))


def rate_factor(step: int, steps: int) -> float:
    """The factor of the peak learning rate in step number `step` (from 0) of `steps` steps. The
    factor rises linearly in the first WARMUP * steps steps, then falls along a half cosine."""
    warmup = math.ceil(WARMUP * steps)
    if step < warmup:
        return (step + 1) / warmup
    position = (step - warmup) / max(1, steps - warmup)  # on the half cosine, from 0 to 1
    return 0.5 * (1 + math.cos(math.pi * position))


def rows_of_step(step: int, size: int, n_rows: int, seed: int) -> list[int]:
    """Indices of the `size` rows, out of `n_rows`, that step number `step` reads. Each pass over
    all rows has its own random order."""
    indices = []
    # n_read: number of rows that were read before
    for n_read in range(step * size, (step + 1) * size):
        epoch, position = divmod(n_read, n_rows)
        # numbers from 0 on are for the seeds of steps, so passes take the negative numbers
        generator = torch.Generator().manual_seed(_derive_seed(seed, -1 - epoch))
        indices.append(int(torch.randperm(n_rows, generator=generator)[position]))
    return indices


def _backward(model: Any, rows: Sequence[Row], loss: Loss, rows_at_once: int) -> float:
    """Add the gradients of the mean of `loss` over the learnt tokens of `rows` to the gradients of
    `model`. Returns the mean."""
    tokens = sum(int(learnt[1:].sum()) for _, _, learnt in rows)
    mean_loss = 0.0
    for start in range(0, len(rows), rows_at_once):
        batch = _stack_rows(rows[start : start + rows_at_once], model.device)
        part_of_mean = loss(model, *batch) / tokens
        backward(model, part_of_mean)
        mean_loss += float(part_of_mean.detach())
    return mean_loss


def answer_loss(
    model: Any, ids: torch.Tensor, valid: torch.Tensor, answers: torch.Tensor
) -> torch.Tensor:
    """Sum of -log p(token | tokens before it) over the tokens that `answers` marks, except the
    first token of a row; computed in fp32. All arguments but `model` are (B, S)."""
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
    """Sum of tau^2 KL(p || q) over the tokens that `learnt` marks, except the first token of a row;
    computed in fp32. `ids`, `valid` and `learnt` are (B, S).

    p and q are the next-token distributions of `teacher` and `model` at the temperature
    tau = `temperature`. Divided by the number of learnt tokens, the sum is the loss of Router-KD
    (arXiv 2603.02217, equations 1 to 3).
    """
    with torch.no_grad():
        log_p = log_softmax(_predictions(teacher, ids, valid, learnt).float() / temperature, -1)
    log_q = log_softmax(_predictions(model, ids, valid, learnt).float() / temperature, -1)
    return temperature**2 * kl_div(log_q, log_p, reduction="sum", log_target=True)


def _predictions(
    model: Any, ids: torch.Tensor, valid: torch.Tensor, learnt: torch.Tensor
) -> torch.Tensor:
    """Logits (N, V) with which `model` predicts the N tokens that `learnt` (B, S) marks, except the
    first token of a row."""
    # whether a position predicts a learnt token
    predicts_learnt = learnt[:, 1:]
    # positions that do so in at least one row: `logits_to_keep` takes the same ones of all rows
    columns = predicts_learnt.any(0).nonzero()[:, 0]
    mask = None if bool(valid.all()) else valid.to(torch.int64)
    logits: torch.Tensor = model(
        input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=columns
    ).logits
    return logits[predicts_learnt[:, columns]]


def _stack_rows(rows: Sequence[Row], device: torch.device) -> tuple[torch.Tensor, ...]:
    """(ids, valid, learnt), each (B, S), without the rows' common padding."""
    ids, valid, learnt = (torch.stack(tensors) for tensors in zip(*rows, strict=True))
    end = int(valid.any(0).nonzero().max()) + 1
    return tuple(to_device(tensor[:, :end], device) for tensor in (ids, valid, learnt))


def _derive_seed(seed: int, step: int) -> int:
    """The seed of step number `step`, or of a pass over the rows if `step` is negative. The seed
    has 7 bytes, because torch takes at most 8."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step}".encode()).digest()[:7], "big")


def save_progress(folder: Path, content: Mapping[str, Any]) -> None:
    """Write a checkpoint with `content` to `folder`. The file is replaced atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary_file = folder / f"{PROGRESS_FILE}.part"
    torch.save(content, temporary_file)
    temporary_file.replace(folder / PROGRESS_FILE)


def load_progress(
    folder: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> list[float]:
    """Restore the parameters and the state of the optimiser from the checkpoint in `folder`, and
    return the losses of the finished steps. Returns [] if the checkpoint is missing or damaged, or
    has other parameters."""
    try:
        content = torch.load(folder / PROGRESS_FILE, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, UnpicklingError):
        return []
    if content["parameters"].keys() != parameters.keys():
        return []
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(content["parameters"][name])
    optimizer.load_state_dict(content["optimizer"])
    losses: list[float] = content["losses"]
    return losses


# Models to train.


@dataclass(frozen=True)
class Student:
    """A pruned model, and the parameters to train."""

    model: Any
    parameters: Groups
    finish: Callable[[], dict[str, torch.Tensor]]
    """Ends the training and returns the changed tensors: name in the pruned model's state dict ->
    tensor."""


def student(
    model: Any, plan: Plan, settings: RecoveryConfig, seed: int
) -> AbstractContextManager[Student]:
    """A context with a copy of `model` and the copy's parameters to train. With
    recovery.train=routers, the copy is masked by `plan`, and its router weights are trained.
    Otherwise the copy is pruned by `plan`, and DoRA adapters on its MoE blocks are trained."""
    if settings.train == "routers":
        return trained_routers(model, plan)
    copy = prune(model, plan)
    adapted = attach(copy, settings, seed)
    finish = functools.partial(merge, copy, adapted)
    return nullcontext(Student(copy, trainable(adapted), finish))


@contextmanager
def trained_routers(model: Any, plan: Plan) -> Iterator[Student]:
    """A context that yields a copy of `model` under the mask of `plan`. The weights of the copy's
    routers are trained, and everything else is frozen.

    The copy shares the frozen tensors with `model`. Under the mask, a router's weight only has the
    rows of retained experts. Weights of 16 bits are trained as fp32 copies, because rounding to 16
    bits would lose small steps.
    """
    masked = share_copy(model)
    masked.requires_grad_(False)
    modules = {layer.index: router_weight(layer) for layer in routed_layers(masked)}
    paths = {module: path for path, module in masked.named_modules()}
    with ExitStack() as stack:
        stack.enter_context(mask(masked, plan))
        copies = {}
        for layer, module in modules.items():
            copies[layer] = PreciseWeight(module.weight)  # type: ignore[arg-type]
            parametrize.register_parametrization(module, "weight", copies[layer], unsafe=True)
            # undone before the mask ends, because the mask puts the original weight back
            stack.callback(
                parametrize.remove_parametrizations, module, "weight", leave_parametrized=False
            )

        def finish() -> dict[str, torch.Tensor]:
            return {
                f"{paths[module]}.weight": module.weight.detach()  # type: ignore[operator]
                for module in modules.values()
            }

        parameters = {f"routers.{layer}.weight": copy.precise for layer, copy in copies.items()}
        yield Student(masked, {"routers": parameters}, finish)


class PreciseWeight(nn.Module):
    """Parametrisation that replaces a weight by a trained copy in at least fp32."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.precise = nn.Parameter(at_least_fp32(weight.detach()).clone())

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The trained copy, rounded to the dtype of `weight`."""
        return self.precise.to(weight.dtype)
