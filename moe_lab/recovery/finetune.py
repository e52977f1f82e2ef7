"""Fine-tune a pruned model, and save its changed tensors.

The model learns the answers of an instruction set, or the next-token distributions of the unpruned
model on any text. The seed determines the order of rows. A stopped training resumes from its last
checkpoint, and ends with the same weights as an uninterrupted training.
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
"""Share of the steps, at the beginning, in which learning rates rise from 0 to their peak, because
AdamW has seen too few gradients to scale them."""
CLIP = 0.5
"""Gradients of a step with a larger norm are scaled down to this norm, so that no single step
undoes many steps."""
SAVE_EVERY = 50
"""Number of steps between two checkpoints. A killed run then loses a few minutes, and writing
checkpoints takes a few percent of a run's time."""
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
    """Prune a copy of `model` by `plan` (None to prune nothing), and train the copy: its routers
    with recovery.train=routers, otherwise DoRA adapters on its MoE blocks.

    The copy learns the answers of `text` or, with recovery.distill, the predictions of the unpruned
    `model` on `text`. `model` is not changed. The folder `out` gets two files, from which
    `apply.recovered` makes the fine-tuned model:

    tuned.safetensors  tensors that differ from the pruned model's, by names in its state dict
    finetune.json      loss of each step, trained parameters, tokens, steps, seconds

    Checkpoints are saved in the folder `partial`, from which a stopped run resumes; no other run
    may use this folder. seed: see `student` and `train`. UserError for a text in which nothing can
    be learnt, and for a loss that is not finite.
    """
    is_distilled = settings.distill is not None
    rows = text_rows(text, tokenizer) if is_distilled else answer_rows(text, tokenizer)
    distillation = functools.partial(
        distillation_loss, teacher=model, temperature=settings.temperature
    )
    start_time = time.monotonic()
    with student(model, plan, settings, seed) as learner:
        losses = train(
            learner.model,
            learner.parameters,
            rows,
            settings,
            loss=distillation if is_distilled else answer_loss,
            rows_at_once=text.batch_size,
            partial=partial,
            seed=seed,
        )
        counts = {
            part: sum(map(torch.numel, named.values()))
            for part, named in learner.parameters.items()
        }
        tuned_tensors = learner.finish()
    # the first token of a row has no prediction
    tokens = sum(int(learnt[1:].sum()) for _, _, learnt in rows)
    report = {
        "trained_parameters": counts,
        "rows": len(rows),
        "tokens" if is_distilled else "answer_tokens": tokens,
        "steps": len(losses),
        "seconds": round(time.monotonic() - start_time, 1),
        "loss": losses,
    }
    save_tuned(out, tuned_tensors, report)


def answer_rows(text: CalibrationConfig, tokenizer: Any) -> list[Row]:
    """The rows of an instruction set that have a token of an answer after their first token.
    UserError when there are no such rows."""
    reason = "no row holds an answer after its first token: expected answers"
    return _rows_to_learn(answer_batches(text, tokenizer, header=True), text, reason)


def text_rows(text: CalibrationConfig, tokenizer: Any) -> list[Row]:
    """The rows of any text, in which the model learns each valid token that follows a valid token.
    UserError when there are no such tokens."""
    marked_batches = []
    for ids, valid in batches(text, tokenizer).rows:
        # the value of the first column does not matter, since first tokens are never learnt
        follows_valid = pad(valid[:, :-1], (1, 0), value=True)
        marked_batches.append((ids, valid, valid & follows_valid))
    return _rows_to_learn(
        marked_batches, text, "no token follows another one: expected longer documents"
    )


def _rows_to_learn(
    marked_batches: Iterable[Sequence[torch.Tensor]], text: CalibrationConfig, reason: str
) -> list[Row]:
    """The rows of the batches (ids, valid, learnt) that have a learnt token after their first
    token. UserError, which gives the `reason`, when there are no such rows."""
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
    """Train the parameters in `groups`, which are parameters of `model`, on `rows`, by AdamW
    without weight decay. Returns the loss of each step, in nats per learnt token.

    A step reads `settings.rows_per_step` rows, with `rows_at_once` rows in each forward pass. The
    loss of the step is the mean over all learnt tokens of its rows. All random numbers of a step
    are drawn from (seed, step). So a training that resumes from the checkpoint in the folder
    `partial` gives exactly the weights of an uninterrupted training. UserError for a loss that is
    not finite.
    """
    parameters = {name: parameter for named in groups.values() for name, parameter in named.items()}
    parts = [part for part in groups if groups[part]]
    optimizer = torch.optim.AdamW(
        [{"params": list(groups[part].values())} for part in parts], lr=0.0, weight_decay=0.0
    )
    steps = step_count(settings, len(rows))
    rows_digest = digest(tensor for row in rows for tensor in row)
    identity = json.dumps(
        {"settings": settings.identity, "seed": seed, "rows": rows_digest}, sort_keys=True
    )
    losses = load_progress(partial, identity, parameters, optimizer)
    for step in range(len(losses), steps):
        indices = rows_of_step(step, settings.rows_per_step, len(rows), seed)
        for part, group in zip(parts, optimizer.param_groups, strict=True):
            group["lr"] = getattr(settings, RATES[part]) * rate_factor(step, steps)
        with torch.random.fork_rng():
            torch.manual_seed(_derive_seed(seed, step))
            losses.append(_backward(model, [rows[row] for row in indices], loss, rows_at_once))
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
            values = {name: parameter.detach() for name, parameter in parameters.items()}
            state = {"about": identity, "losses": losses, "parameters": values}
            save_progress(partial, {**state, "optimizer": optimizer.state_dict()})
    return losses


def step_count(settings: RecoveryConfig, n_rows: int) -> int:
    """Number of steps for `settings.epochs` passes over `n_rows` rows, at least 1. The last step
    may also read rows of a further pass."""
    return max(1, math.ceil(settings.epochs * n_rows / settings.rows_per_step))


def rate_factor(step: int, steps: int) -> float:
    """The learning rate in step number `step` (from 0) of `steps` steps, as a share of the peak.
    The rate rises linearly in the first share WARMUP of the steps. Then it falls as half a cosine,
    which would be 0 in the step after the last."""
    warmup = math.ceil(WARMUP * steps)
    if step < warmup:
        return (step + 1) / warmup
    share = (step - warmup) / max(1, steps - warmup)
    return 0.5 * (1 + math.cos(math.pi * share))


def rows_of_step(step: int, size: int, n_rows: int, seed: int) -> list[int]:
    """Indices of the `size` rows that a step reads, out of `n_rows`. The steps read all rows again
    and again. Each such pass has its own order, drawn from the seed and the number of the pass."""
    indices = []
    for number in range(step * size, (step + 1) * size):  # numbers count the rows of all steps
        epoch, position = divmod(number, n_rows)
        generator = torch.Generator().manual_seed(_derive_seed(seed, -1 - epoch))
        indices.append(int(torch.randperm(n_rows, generator=generator)[position]))
    return indices


def _backward(model: Any, rows: Sequence[Row], loss: Loss, rows_at_once: int) -> float:
    """The mean of `loss` over the learnt tokens of `rows`. Its gradients are added to the gradients
    of the parameters of `model`. A forward pass reads `rows_at_once` rows."""
    tokens = sum(int(learnt[1:].sum()) for _, _, learnt in rows)
    mean_loss = 0.0
    for start in range(0, len(rows), rows_at_once):
        batch = _stack_rows(rows[start : start + rows_at_once], model.device)
        part_of_mean = loss(model, *batch) / tokens
        part_of_mean.backward()
        mean_loss += float(part_of_mean.detach())
    return mean_loss


def answer_loss(
    model: Any, ids: torch.Tensor, valid: torch.Tensor, answers: torch.Tensor
) -> torch.Tensor:
    """Sum of -log p(token | tokens before it) over the tokens that `answers` (B, S) marks, except
    the first token of a row; computed in fp32."""
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
    """Sum of tau^2 KL(p || q) over the tokens that `learnt` (B, S) marks, except the first token of
    a row; computed in fp32.

    p and q are the next-token distributions of `teacher` and `model` over the whole vocabulary, at
    the temperature tau. Divided by the number of learnt tokens, the sum is the loss of Router-KD
    (arXiv 2603.02217, equations 1 to 3). No gradient flows into the teacher.
    """
    with torch.no_grad():
        log_p = log_softmax(_predictions(teacher, ids, valid, learnt).float() / temperature, -1)
    log_q = log_softmax(_predictions(model, ids, valid, learnt).float() / temperature, -1)
    return temperature**2 * kl_div(log_q, log_p, reduction="sum", log_target=True)


def _predictions(
    model: Any, ids: torch.Tensor, valid: torch.Tensor, learnt: torch.Tensor
) -> torch.Tensor:
    """Logits (N, V) of `model`: the predictions of the N tokens that `learnt` (B, S) marks. The
    first token of a row does not count, because nothing predicts it. ids, valid: see `Loss`."""
    targets = learnt[:, 1:]
    # Logits are computed in all rows for each column that has a target in at least one row.
    columns = targets.any(0).nonzero()[:, 0]
    mask = None if bool(valid.all()) else valid.to(torch.int64)
    logits: torch.Tensor = model(
        input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=columns
    ).logits
    return logits[targets[:, columns]]


def _stack_rows(rows: Sequence[Row], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Stack rows into a batch (ids, valid, learnt), each (B, S), without the columns at the right
    end in which no row has a valid token."""
    ids, valid, learnt = (torch.stack(tensors) for tensors in zip(*rows, strict=True))
    end = int(valid.any(0).nonzero().max()) + 1
    return tuple(tensor[:, :end].to(device) for tensor in (ids, valid, learnt))


def _derive_seed(seed: int, step: int) -> int:
    """Derive the seed of a step from the seed of the training. A negative `step` stands for a pass
    over all rows. Seeds are hashes, so the seeds of different steps are unrelated. They have 7
    bytes, because torch takes at most 8."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step}".encode()).digest()[:7], "big")


def save_progress(folder: Path, content: Mapping[str, Any]) -> None:
    """Write a checkpoint with `content` to `folder`, where `load_progress` reads it. The file is
    replaced atomically."""
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
    """Restore the parameters and the state of the optimiser from the checkpoint in `folder`, and
    return the losses of the finished steps. If the checkpoint is missing or damaged, or if its
    training had another `identity`, change nothing and return []."""
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


# Models to train: a pruned copy with DoRA adapters on its MoE blocks, or a masked copy with
# trainable routers.


@dataclass(frozen=True)
class Student:
    """A pruned model, and the parameters to train."""

    model: Any
    parameters: Groups
    finish: Callable[[], dict[str, torch.Tensor]]
    """Function that ends the training and returns the changed tensors, as name in the pruned
    model's state dict -> tensor."""


@contextmanager
def student(
    model: Any, plan: Plan | None, settings: RecoveryConfig, seed: int
) -> Iterator[Student]:
    """A context with a copy of `model`, and the parameters of the copy to train. The copy is
    pruned by `plan`, or masked by `plan` for recovery.train=routers; None changes no experts. seed:
    see `attach`; unused for routers, which begin with their own weights. `model` is not changed."""
    if settings.train == "routers":
        with trained_routers(model, plan) as learner:
            yield learner
    else:
        copy = pruned(model, plan)
        adapted = attach(copy, settings, seed)
        yield Student(copy, trainable(adapted), functools.partial(merge, copy, adapted))


@contextmanager
def trained_routers(model: Any, plan: Plan | None) -> Iterator[Student]:
    """A context with a copy of `model` under the mask of `plan` (None for no mask). The weights of
    the copy's routers are trained, and everything else is frozen.

    The copy shares all other tensors with `model`, so that the teacher needs no further memory.
    Only the rows of retained experts are trained; biases of routers and correction biases are
    frozen. Weights of 16 bits are trained as fp32 copies, because rounding would lose small steps.
    Each forward pass rounds the copies as the evaluation does.
    """
    masked = share_copy(model)
    masked.requires_grad_(False)
    owners = {layer.index: router_weight(layer) for layer in routed_layers(masked)}
    paths = {module: path for path, module in masked.named_modules()}
    with ExitStack() as stack:
        if plan is not None:
            stack.enter_context(mask(masked, plan))
        copies = {}
        for layer, owner in owners.items():
            copies[layer] = PreciseWeight(owner.weight)  # type: ignore[arg-type]
            parametrize.register_parametrization(owner, "weight", copies[layer], unsafe=True)
            # This callback runs before the mask ends. The mask then puts the whole weight back in
            # place of the rows of retained experts.
            stack.callback(
                parametrize.remove_parametrizations, owner, "weight", leave_parametrized=False
            )

        def finish() -> dict[str, torch.Tensor]:
            """The trained weights, rounded, by their names in the model's state dict."""
            return {f"{paths[owner]}.weight": owner.weight.detach() for owner in owners.values()}  # type: ignore[operator]

        parameters = {f"routers.{layer}.weight": copy.precise for layer, copy in copies.items()}
        yield Student(masked, {"routers": parameters}, finish)


class PreciseWeight(nn.Module):
    """Parametrisation that replaces a weight by a trained copy in at least fp32."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Copy `weight`, in at least fp32, to train the copy."""
        super().__init__()
        self.precise = nn.Parameter(wide(weight.detach()).clone())

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The trained copy, rounded to the dtype of `weight`."""
        return self.precise.to(weight.dtype)
