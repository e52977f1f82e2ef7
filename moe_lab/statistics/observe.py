"""Observe the routed experts of a model while it reads a calibration set, in one pass with
checkpoints. One hook per MoE layer replaces the forward of the layer's experts module."""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from moe_lab import progress
from moe_lab.errors import UserError
from moe_lab.models.discover import MoELayer, moe_layers, routed_layers
from moe_lab.models.experts import ExpertsFunction, are_replaced, replace_experts, run, to_device
from moe_lab.statistics import Layers, Statistics, check_finite, combine

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
    """Run one forward pass of `model` without gradients."""
    with torch.no_grad():
        run(model, input_ids, valid)


def hidden_states(output: Any) -> torch.Tensor:
    """The hidden states (T, H) in the output of a decoder layer or of its experts."""
    states: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return states.flatten(0, -2)


class StatisticsHook:
    """Observes one MoE layer. The method `experts` of a subclass computes the layer's routed output
    in place of the model's own code, and adds statistics of the tokens to `sums`.

    `sums`: name of a statistic -> fp64 tensor, on the device of the activations, over the batches
    read so far.
    """

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
        """`start`: the sums of an interrupted pass; {} for a new pass."""
        self.observer = observer
        self.layer = layer
        self.sums = dict(start)

    def experts(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The routed output (T, H). `hidden` (T, H): hidden states. `index` (T, K): ids of the
        experts of each token. `weights` (T, K): gates."""
        raise NotImplementedError

    def replacement(self, unobserved: ExpertsFunction) -> ExpertsFunction:
        """The method `experts`, which replaces the function `unobserved` in the model."""
        self.unobserved = unobserved
        return self.experts

    def after_router(self, module: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """Called with the output `result` of the layer's router, before the layer's experts run."""

    def router_logits(self, result: Any) -> torch.Tensor | None:
        """The logits (T, E) of all experts in the output `result` of the layer's router; None if it
        returns none."""
        logits = result[0] if isinstance(result, tuple) else None
        if not isinstance(logits, torch.Tensor) or logits.shape[-1] != self.layer.n_experts:
            return None
        return logits.detach().reshape(-1, self.layer.n_experts)

    def after_layer(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        """Called with the output `result` of the decoder layer that contains the experts."""

    def register_hooks(self, decoder_layer: torch.nn.Module) -> Iterable[RemovableHandle]:
        """Register the further hooks that a subclass needs on `decoder_layer`, by default none, and
        return their handles."""
        return ()

    def result(self) -> dict[str, torch.Tensor]:
        """Name -> statistic of the layer over the batches read so far. Called while the weights of
        the layer are in memory."""
        return self.sums

    def add(self, sums: Mapping[str, torch.Tensor]) -> None:
        """Add `sums`, name -> value of the statistic for further tokens, to `self.sums` in fp64.
        For a name that ends in _max, take the maximum instead."""
        new = {name: value.double() for name, value in sums.items()}
        totals = {
            # the sums of an interrupted pass are on the CPU
            name: self.sums[name].to(value.device)
            for name, value in new.items()
            if name in self.sums
        }
        self.sums |= combine(totals, new)

    def ignored_tokens(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """(T,) bool: whether each token of `hidden` (T, H) does not count in the statistics. None
        when all tokens count. UserError when `hidden` has more or fewer tokens than the batch."""
        mask = self._mask(hidden)
        return None if mask is None else to_device(~mask, hidden.device)

    def valid_indices(self, hidden: torch.Tensor) -> torch.Tensor:
        """Indices (V,) of the tokens of `hidden` (T, H) that count. Errors as in
        `ignored_tokens`."""
        mask = self._mask(hidden)
        if mask is None:
            return torch.arange(len(hidden), device=hidden.device)
        # found on the CPU, so that a device is not waited for
        return to_device(mask.nonzero()[:, 0], hidden.device)

    def _mask(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """(T,) bool: whether each token counts, on the device of the batch's mask, mostly the CPU;
        None when all count. Errors as in `ignored_tokens`."""
        valid = self.observer.valid
        if valid is None or bool(valid.all()):
            return None
        if valid.numel() != len(hidden):
            raise UserError(
                f"{self.layer.name} saw {len(hidden)} tokens, expected the batch's {valid.numel()}"
            )
        return valid.flatten()


class Observer:
    """While an observer is open, its hooks observe every forward pass of `model`. Each layer has a
    hook of the class `hook`.

        with Observer(model, ForwardHook) as observer:
            observer.run_batch(input_ids, valid)
        observer.layers()   # layer -> name -> fp64 tensor on the CPU

    `layers`: the layers to observe; None: all MoE layers, which may be ragged only for a hook that
    does not compute experts. `start`: the sums of an interrupted pass;
    None for a new pass.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        hook: type[StatisticsHook],
        start: Layers | None = None,
        layers: Sequence[MoELayer] | None = None,
    ) -> None:
        self.model = model
        if layers is None:
            layers = moe_layers(model) if hook.computes else routed_layers(model)
        self.hooks = [hook(self, layer, (start or {}).get(layer.index, {})) for layer in layers]
        self.valid: torch.Tensor | None = None
        """(B, S) bool: which tokens of the batch count; None: all."""
        self._undo = ExitStack()

    def __enter__(self) -> Observer:
        """Register all hooks; after an error, no hook stays registered. RuntimeError if a hook
        computes experts itself, and the experts of its layer are already replaced: by another
        observer, or by a mask under a plan of channels."""
        with ExitStack() as undo:
            for hook in self.hooks:
                if hook.computes and are_replaced(hook.layer):
                    raise RuntimeError(
                        f"{hook.layer.name} is observed already, or under a plan of channels"
                    )
                replace_experts(hook.layer, hook.replacement, undo)
                decoder_layer = self.model.get_submodule(f"{hook.layer.stack}.{hook.layer.index}")
                undo.callback(
                    hook.layer.router.register_forward_hook(
                        hook.after_router, with_kwargs=True
                    ).remove
                )
                undo.callback(decoder_layer.register_forward_hook(hook.after_layer).remove)
                for handle in hook.register_hooks(decoder_layer):
                    undo.callback(handle.remove)
            # no error: the hooks stay until `__exit__`
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    def run_batch(
        self, input_ids: torch.Tensor, valid: torch.Tensor, reading: Reading = forward
    ) -> Any:
        """The result of `reading` on one batch. `input_ids` (B, S): tokens. `valid` (B, S) bool:
        whether each token counts."""
        self.valid = valid
        return reading(self.model, input_ids, valid)

    def layers(self) -> Layers:
        """Layer -> name -> statistic over the batches read so far, in fp64 on the CPU."""
        return {
            hook.layer.index: {name: part.cpu() for name, part in hook.result().items()}
            for hook in self.hooks
        }


class SaveTimer:
    """Decides when a pass saves its sums in the folder `out`; never if `out` is None.

    While the timer is open, SIGTERM does not end the process at once. Instead the pass saves first,
    and then SIGTERM has its usual effect.
    """

    def __init__(self, out: Path | None) -> None:
        self.out = out
        self.last_save = time.monotonic()
        self.save_seconds = 0.0
        """Seconds that the last save took."""
        self.stop_requested = False
        self._previous_handler: Any = None

    def __enter__(self) -> SaveTimer:
        # Python allows only the main thread to set handlers of signals
        if self.out is not None and threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGTERM, self._request_stop)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)
        if self.stop_requested:
            self.stop_requested = False
            signal.raise_signal(signal.SIGTERM)

    def _request_stop(self, *_: object) -> None:
        """The handler of SIGTERM while the timer is open."""
        self.stop_requested = True

    def is_due(self) -> bool:
        """Whether the pass should save now."""
        interval_is_over = time.monotonic() - self.last_save >= max(
            SAVE_INTERVAL, SAVE_FACTOR * self.save_seconds
        )
        return self.out is not None and (interval_is_over or self.stop_requested)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A context in which the pass saves its sums. If a SIGTERM was held back, the signal has
        its usual effect after the save."""
        start = time.monotonic()
        yield
        self.last_save = time.monotonic()
        self.save_seconds = self.last_save - start
        if self.stop_requested:
            self.__exit__()  # sends the signal again, to the previous handler


def collect_statistics(
    model: PreTrainedModel,
    hook: type[StatisticsHook],
    batches: Sequence[Batch],
    *,
    out: Path | None = None,
    reading: Reading = forward,
    context: AbstractContextManager[None] | None = None,
) -> Statistics:
    """The sums that hooks of the class `hook` collect while `reading` runs the model on each batch.
    `context`: a context in which it is run, such as a mask.

    Every few minutes the sums so far are saved in the folder `out`, unless `out` is None or
    `hook.resumes` is False. No other pass may use the folder. An interrupted pass continues from
    the saved sums; on the CPU the result is then bit for bit that of an uninterrupted pass.
    UserError if there are no batches, if a sum is NaN or infinite (the message names layer and
    expert), and for models that cannot be observed.
    """
    out = out if hook.resumes else None
    header = pass_header(model, batches, hook.kind)
    done, layers = load_checkpoint(out, header)
    observer = Observer(model, hook, layers)  # finds the layers of the unmasked model
    with SaveTimer(out) as timer, context or nullcontext(), observer:
        for number, (ids, valid) in enumerate(batches[done:], done + 1):
            observer.run_batch(ids, valid, reading)
            progress.update(number, len(batches), "batches")
            # after the last batch also if `out` is None, because the sums are read here
            if number == len(batches) or timer.is_due():
                with timer.saving():
                    layers = observer.layers()
                    check_finite(layers, f"batches {done + 1} to {number}", model.dtype)
                    done = number
                    save_checkpoint(out, layers, header, done)
    return Statistics(layers, header)


def pass_header(model: PreTrainedModel, batches: Sequence[Batch], kind: str) -> dict[str, Any]:
    """The header that identifies a pass in its checkpoints: "kind", the kind of the sums, and
    "batches", a digest of the batches. UserError if there are no batches, or if a token has no row
    in the embedding of `model`."""
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
    """Hexadecimal sha256 of the shapes, dtypes and bytes of `tensors`, which are on the CPU."""
    content = hashlib.sha256()
    for tensor in tensors:
        content.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        content.update(tensor.contiguous().numpy().tobytes())
    return content.hexdigest()


def save_checkpoint(out: Path | None, layers: Layers, header: Mapping[str, Any], done: int) -> None:
    """Save the sums `layers` in the folder `out`; if `out` is None, do nothing. `done`: the number
    of finished batches, or of finished parts of a `LayerPass`."""
    if out is not None:
        Statistics(layers, {**header, "done": done}).save(out / CHECKPOINT)


def load_checkpoint(out: Path | None, header: Mapping[str, Any]) -> tuple[int, Layers]:
    """(`done`, `layers`) that `save_checkpoint` saved in the folder `out`. (0, {}) if the folder
    has no checkpoint with the header `header`."""
    if out is None or not (out / CHECKPOINT).exists():
        return 0, {}
    try:
        saved = Statistics.load(out / CHECKPOINT)
    except UserError:  # the checkpoint is damaged: the pass starts again
        return 0, {}
    done = saved.header.pop("done", 0)
    return (done, saved.layers) if saved.header == header else (0, {})
