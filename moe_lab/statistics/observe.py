"""Observe the routed experts of a model while it reads a calibration set, in one pass with
checkpoints. One hook per MoE layer replaces the forward of the layer's experts module."""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from moe_lab import progress
from moe_lab.errors import UserError
from moe_lab.models.discover import MoELayer, moe_layers
from moe_lab.models.experts import ExpertsFunction, are_replaced, replace_experts, run
from moe_lab.statistics import Layers, Statistics, check_finite, plus

Reading = Callable[[PreTrainedModel, torch.Tensor, torch.Tensor], Any]
"""Function that runs a model on one batch: model, input_ids (B, S), valid (B, S)."""
CHECKPOINT = "checkpoint.safetensors"
SAVE_INTERVAL = 180.0
"""Fewest seconds between two saves of a pass."""
SAVE_FACTOR = 50
"""Fewest seconds between two saves, as a multiple of the seconds that the last save took. Saving
takes at most 2 % of a pass."""
Batch = tuple[torch.Tensor, torch.Tensor]
"""(input_ids, valid), (B, S) int64 and (B, S) bool: the tokens, and which of them count."""


def forward(model: PreTrainedModel, input_ids: torch.Tensor, valid: torch.Tensor) -> None:
    """Run one forward pass without gradients: the default `Reading`."""
    with torch.no_grad():
        run(model, input_ids, valid)


class StatisticsHook:
    """Observes one layer: replaces its experts and holds its `sums` so far (name -> fp64 tensor, on
    the device of the activations). The method `experts` of a subclass computes the routed output
    and adds to the sums."""

    kind: ClassVar[str]
    """`kind` in the header of the sums."""
    computes: ClassVar[bool] = True
    """Whether the hook computes experts itself, so that it cannot observe a model under a plan of
    channels."""
    resumes: ClassVar[bool] = True
    """Whether an interrupted pass can resume from the sums alone."""
    unobserved: ExpertsFunction
    """The function that computes the layer's routed output when it is not observed."""

    def __init__(self, observer: Observer, layer: MoELayer, start: dict[str, torch.Tensor]) -> None:
        """`start`: the sums over the batches that were read before; {} for a new pass."""
        self.observer = observer
        self.layer = layer
        self.sums = dict(start)

    def experts(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The routed output (T, H) from hidden states (T, H), expert ids (T, K) and gates (T,
        K)."""
        raise NotImplementedError

    def wrap(self, unobserved: ExpertsFunction) -> ExpertsFunction:
        """The function that replaces `unobserved`, the function that computes the layer's experts.
        The replacement may call `unobserved`."""
        self.unobserved = unobserved
        return self.experts

    def after_router(self, module: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """Called after the layer's router, before its experts."""

    def after_layer(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        """Called after the decoder layer that contains the experts."""

    def watch(self, decoder_layer: torch.nn.Module) -> Iterable[RemovableHandle]:
        """Register further hooks in `decoder_layer`; they are removed when the observer is
        closed."""
        return ()

    def result(self) -> dict[str, torch.Tensor]:
        """The layer's statistics after the batches read so far. Called while the layer has its
        weights."""
        return self.sums

    def add(self, name: str, part: torch.Tensor) -> None:
        """Add `part` to the statistic `name`, in fp64. If the name ends in _max, take the maximum
        instead of the sum."""
        part = part.double()
        if name in self.sums:
            total = self.sums[name].to(part.device)
            part = plus(name, total, part)
        self.sums[name] = part

    def valid(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """(T,) bool: which of the tokens in `hidden` (T, H) count; None when all tokens count."""
        valid = self.observer.valid
        if valid is None or bool(valid.all()):
            return None
        if valid.numel() != len(hidden):
            raise UserError(
                f"{self.layer.name} saw {len(hidden)} tokens, expected the batch's {valid.numel()}"
            )
        return valid.flatten().to(hidden.device)


class Observer:
    """Observes MoE layers of a model with one hook each, while it is open.

        with Observer(model, ForwardHook) as observer:
            observer.read(input_ids, valid)
        observer.layers()   # layer -> name -> fp64 tensor on the CPU

    Every forward pass of the model is observed while the observer is open. `layers`: the layers to
    observe; None: all MoE layers. `start`: sums to continue from.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        hook: type[StatisticsHook],
        start: Layers | None = None,
        layers: Sequence[MoELayer] | None = None,
    ) -> None:
        self.model = model
        observed = moe_layers(model) if layers is None else layers
        self.hooks = [hook(self, layer, (start or {}).get(layer.index, {})) for layer in observed]
        self.valid: torch.Tensor | None = None
        """(B, S) bool: which tokens of the batch count; None: all."""
        self._open = ExitStack()

    def __enter__(self) -> Observer:
        """Register all hooks; if this fails, none stays registered. RuntimeError for a layer whose
        experts are replaced already, unless the hooks compute no experts."""
        with ExitStack() as stack:
            for hook in self.hooks:
                if hook.computes and are_replaced(hook.layer):
                    raise RuntimeError(
                        f"{hook.layer.name} is observed already, or under a plan of channels"
                    )
                replace_experts(hook.layer, hook.wrap, stack)
                decoder_layer = self.model.get_submodule(f"{hook.layer.stack}.{hook.layer.index}")
                stack.callback(
                    hook.layer.router.register_forward_hook(
                        hook.after_router, with_kwargs=True
                    ).remove
                )
                stack.callback(decoder_layer.register_forward_hook(hook.after_layer).remove)
                for handle in hook.watch(decoder_layer):
                    stack.callback(handle.remove)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def read(self, input_ids: torch.Tensor, valid: torch.Tensor, reading: Reading = forward) -> Any:
        """The result of `reading`, which runs the model on one batch. `valid`: which tokens
        count."""
        self.valid = valid
        return reading(self.model, input_ids, valid)

    def layers(self) -> Layers:
        """The sums so far: layer -> name -> fp64 tensor on the CPU."""
        return {
            hook.layer.index: {name: part.cpu() for name, part in hook.result().items()}
            for hook in self.hooks
        }


class SaveTimer:
    """Decides when a pass saves its sums in the folder `out`, by SAVE_INTERVAL and SAVE_FACTOR; if
    `out` is None, the pass never saves. While the timer is open, SIGTERM is held back until the
    pass has saved, and then has its usual effect."""

    def __init__(self, out: Path | None) -> None:
        """Begin as if the pass had just saved, in no time."""
        self.out = out
        self.last_save = time.monotonic()
        self.save_seconds = 0.0
        self.stop_requested = False
        self._previous_handler: Any = None

    def __enter__(self) -> SaveTimer:
        """Begin to hold SIGTERM back."""
        # other threads cannot handle signals
        if self.out is not None and threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGTERM, self._request_stop)
        return self

    def __exit__(self, *exception: object) -> None:
        """Restore the handler of SIGTERM, and send this process the SIGTERM that was held back."""
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)
        if self.stop_requested:
            self.stop_requested = False
            signal.raise_signal(signal.SIGTERM)

    def _request_stop(self, *_: object) -> None:
        """Handler of SIGTERM, which only records the signal."""
        self.stop_requested = True

    def due(self) -> bool:
        """Whether the pass should save now: a SIGTERM is held back, or the last save was long ago,
        also compared with the seconds that it took. Never if `out` is None."""
        interval_is_over = time.monotonic() - self.last_save >= max(
            SAVE_INTERVAL, SAVE_FACTOR * self.save_seconds
        )
        return self.out is not None and (interval_is_over or self.stop_requested)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A context in which the pass saves. The seconds of the save are measured. A SIGTERM that
        was held back takes effect after it."""
        start = time.monotonic()
        yield
        self.last_save = time.monotonic()
        self.save_seconds = self.last_save - start
        if self.stop_requested:
            self.__exit__()


def gather(
    model: PreTrainedModel,
    hook: type[StatisticsHook],
    batches: Sequence[Batch],
    *,
    out: Path | None = None,
    reading: Reading = forward,
) -> Statistics:
    """The sums that `hook` collects over `batches`, each read by `reading`.

    Every few minutes the sums are saved in the folder `out`, unless `out` is None or passes of
    `hook` cannot resume. No other pass may use the folder. If the folder already has sums of the
    same batches, the pass continues from these sums; on the CPU the result is exactly that of an
    uninterrupted pass. UserError if there are no batches, for NaN or infinite sums (naming layer
    and expert), and for models that cannot be observed.
    """
    out = out if hook.resumes else None
    header = pass_header(model, batches, hook.kind)
    done, layers = resume(out, header)
    with SaveTimer(out) as timer, Observer(model, hook, layers) as observer:
        for number, (ids, valid) in enumerate(batches[done:], done + 1):
            observer.read(ids, valid, reading)
            progress.update(number, len(batches), "batches")
            if number == len(batches) or timer.due():
                with timer.saving():
                    layers = observer.layers()
                    check_finite(layers, f"batches {done + 1} to {number}")
                    done = number
                    save_checkpoint(out, layers, header, done)
    return Statistics(layers, header)


def pass_header(model: PreTrainedModel, batches: Sequence[Batch], kind: str) -> dict[str, Any]:
    """The header of a pass: the `kind` of its sums, and a digest of `batches`. A checkpoint with an
    equal header is of the same pass. UserError if there are no batches, and for a token for which
    `model` has no embedding."""
    if not batches:
        raise UserError("calibration gives no batches, expected at least one")
    embeddings: Any = model.get_input_embeddings()
    highest = max(int(ids.max()) for ids, _ in batches)
    rows = len(embeddings.weight)
    if highest >= rows:
        raise UserError(
            f"tokenizer: the text has token {highest}, and the model's embedding has {rows} rows: "
            f"expected a tokenizer with ids below {rows}"
        )
    return {"kind": kind, "batches": digest(tensor for batch in batches for tensor in batch)}


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """sha256 of the shapes, types and bytes of tensors on the CPU."""
    content = hashlib.sha256()
    for tensor in tensors:
        content.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        content.update(tensor.contiguous().numpy().tobytes())
    return content.hexdigest()


def save_checkpoint(out: Path | None, layers: Layers, header: Mapping[str, Any], done: int) -> None:
    """Save the sums after `done` parts of a pass in the folder `out`; if `out` is None, do
    nothing."""
    if out is not None:
        Statistics(layers, {**header, "done": done}).save(out / CHECKPOINT)


def resume(out: Path | None, header: Mapping[str, Any]) -> tuple[int, Layers]:
    """(number of finished parts, sums over these parts) from the checkpoint in the folder `out`.
    (0, {}) if the folder has no checkpoint whose header is `header`, or `out` is None."""
    if out is None or not (out / CHECKPOINT).exists():
        return 0, {}
    try:
        saved = Statistics.load(out / CHECKPOINT)
    except UserError:  # damaged: the pass starts again
        return 0, {}
    done = saved.header.pop("done", 0)
    return (done, saved.layers) if saved.header == header else (0, {})
