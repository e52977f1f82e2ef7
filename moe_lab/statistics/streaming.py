"""Calibrate models larger than the memory: each layer in turn reads all batches; a pass reads the
checkpoint once.

A layer is run by the model's own code: the layers below it return stored outputs, the layers above
it are not run.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from moe_lab import progress
from moe_lab.machine import main_memory
from moe_lab.models.discover import MoELayer
from moe_lab.models.experts import stand_in
from moe_lab.models.streamed import StreamedModel
from moe_lab.statistics import Layers, Statistics, check_finite, read
from moe_lab.statistics.gradients import check_loss, differentiable, forward_and_backward
from moe_lab.statistics.observe import (
    Batch,
    Observer,
    Saves,
    StatisticsHook,
    description,
    resume,
    save_checkpoint,
)

SHARE = 0.5
"""Part of the main memory of a process that hidden states may take."""


class States:
    """A tensor for each (key, batch), in memory as far as there is room, else in a file. Key n
    is for the inputs of layer n, the number after the last layer for the final output; -n for
    gradients of the loss at the inputs of layer n."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.room = folder, SHARE * main_memory()
        self.held: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
        self.retained = self.saved = {int(path.name) for path in folder.glob("*")}
        """Keys from which the pass can go on now, and those from which it does when it is
        killed."""

    def put(self, key: int, batch: int, state: torch.Tensor) -> None:
        """Store `state`, detached."""
        if _bytes(state) <= self.room:
            try:
                memory = torch.empty(state.shape, dtype=state.dtype, pin_memory=state.is_cuda)
            except RuntimeError:  # others use the machine, too
                self.room = 0.0
            else:
                self.room -= _bytes(state)
                self.held[key][batch] = memory.copy_(state.detach())
                return
        self._write(key, batch, state)

    def get(self, key: int, batch: int, device: str) -> torch.Tensor:
        """A copy of the stored state, on `device`."""
        held = self.held[key].get(batch)
        state: torch.Tensor = (
            read(self._file(key, batch), "pt")[key][str(batch)] if held is None else held
        )
        # a copy, because rows in the mapped file may start where matrix products round differently
        return state.to(device, copy=True)

    def keep(self, keys: Iterable[int]) -> None:
        """Forget the states of other keys: the pass goes on from these, and adds others."""
        before = self.retained
        self.retained = set(keys)
        for key in before - self.retained:
            self.room += sum(map(_bytes, self.held.pop(key, {}).values()))
        self._delete(before - self.retained - self.saved)

    def save(self, record: Callable[[], None]) -> None:
        """Copy what is kept in memory to files, `record` it, and delete what was saved before."""
        for key in self.retained:
            for batch, state in self.held[key].items():
                if not self._file(key, batch).exists():
                    self._write(key, batch, state)
        record()
        self._delete(self.saved - self.retained)
        self.saved = self.retained

    def _delete(self, keys: Iterable[int]) -> None:
        for key in keys:
            shutil.rmtree(self.folder / str(key), ignore_errors=True)

    def _write(self, key: int, batch: int, state: torch.Tensor) -> None:
        Statistics({key: {str(batch): state.detach().cpu()}}).save(self._file(key, batch))

    def _file(self, key: int, batch: int) -> Path:
        return self.folder / str(key) / f"{batch}.safetensors"


def _bytes(state: torch.Tensor) -> int:
    """Bytes that a state takes in main memory. Pinned memory is given in powers of two."""
    return (
        1 << (state.nbytes - 1).bit_length() if state.is_cuda or state.is_pinned() else state.nbytes
    )


def stream(
    streamed: StreamedModel,
    hook: type[StatisticsHook],
    batches: Sequence[Batch],
    *,
    out: Path,
    under: Callable[[MoELayer], AbstractContextManager[None]] = lambda layer: nullcontext(),
) -> Statistics:
    """Sum what `hook` collects in a forward pass, as `gather` does, with one decoder layer in
    memory.

    Hidden states of all batches are kept in memory, up to SHARE of it, and in the folder `out`
    beyond that. An interrupted pass resumes after the layer that was finished when it was last
    saved there, as by `Saves`. `under`: a context in which a layer is run, such as a mask."""
    rows = LayerPass(
        streamed,
        batches,
        description(streamed.model, batches, hook.kind),
        len(streamed.layers),
        out,
    )
    with rows.running():
        for number in range(rows.done, len(streamed.layers)):
            changed = under(streamed.moe[number]) if number in streamed.moe else nullcontext()
            with streamed.layer(number, next_number=number + 1), torch.no_grad(), changed:
                sums = rows.run(number, hook, keep=number + 1 < len(streamed.layers))
            rows.finish(sums, [number + 1])
    return rows.result()


def stream_back(
    streamed: StreamedModel, hook: type[StatisticsHook], batches: Sequence[Batch], *, out: Path
) -> Statistics:
    """Sum what `hook` collects in a forward and a backward pass, with one decoder layer in memory.
    The sums are those of `gather_gradients`; arguments and resuming are as in `stream`. The forward
    pass goes through all layers and keeps the input of each. The backward pass goes from the last
    layer to the first MoE layer, and runs each of them once more."""
    check_loss(batches)
    first = min(streamed.moe)
    last = len(streamed.layers)
    rows = LayerPass(
        streamed,
        batches,
        description(streamed.model, batches, hook.kind),
        2 * last + 1 - first,
        out,
    )
    with rows.running():
        for number in range(rows.done, last):
            with streamed.layer(number, next_number=number + 1), torch.no_grad():
                rows.run(number, None, keep=True)
            rows.finish({}, range(min(first, number + 1), number + 2))
        with differentiable(streamed.model):
            if rows.done == last:
                for index, (ids, valid) in enumerate(batches):
                    rows.save_if_due()
                    output = rows.states.get(last, index, streamed.device)
                    rows.states.put(-last, index, _gradient_at_head(streamed, ids, valid, output))
                rows.finish({}, [*range(first, last), -last])
            for number in range(2 * last - rows.done, first - 1, -1):
                with (
                    streamed.layer(number, next_number=number - 1),
                    rows.observer(number, hook) as observer,
                ):
                    for index in range(len(batches)):
                        state = rows.entering(number, index)
                        if state is not None:
                            state.requires_grad_()
                        output = rows.read(number, index, state, observer)
                        output.backward(rows.states.get(-(number + 1), index, streamed.device))
                        if number > first and state is not None and state.grad is not None:
                            rows.states.put(-number, index, state.grad)
                    sums = _sums(observer)
                rows.finish(sums, [*range(first, number), -number])
    return rows.result()


class LayerPass:
    """Runs all batches through a streamed model, one decoder layer after the other. The pass that
    `header` describes has `total` parts, each a layer in one direction, and goes on after those
    that were done when it was last saved."""

    def __init__(
        self,
        streamed: StreamedModel,
        batches: Sequence[Batch],
        header: Mapping[str, Any],
        total: int,
        out: Path,
    ) -> None:
        self.streamed = streamed
        self.batches = batches
        self.header = header
        self.total = total
        self.folder = out / "streamed"
        self.done, self.sums = resume(self.folder, header)
        if not self.done:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.states, self.saves = States(self.folder / "states"), Saves(self.folder)

    @contextmanager
    def running(self) -> Iterator[None]:
        """A block that runs the parts, at whose end no memory is held any more."""
        try:
            with self.saves:
                yield
        finally:
            self.states.held.clear()
            if torch.cuda.is_initialized():
                torch.accelerator.empty_host_cache()  # pinned memory is not given back by itself

    def finish(self, sums: Layers, keys: Iterable[int]) -> None:
        """Note that a part is done, with its sums. `keys`: the states that are needed from now
        on."""
        self.sums |= sums
        self.done += 1
        self.states.keep(keys)
        progress.update(self.done, self.total, "layers")
        self.save_if_due()

    def result(self) -> Statistics:
        """The sums of all MoE layers."""
        return Statistics(
            {number: self.sums[number] for number in sorted(self.streamed.moe)}, dict(self.header)
        )

    def save_if_due(self) -> None:
        """Save when it is time, or when the process was told to end."""
        if self.saves.due():
            with self.saves.timed():
                self.states.save(
                    lambda: save_checkpoint(self.folder, self.sums, self.header, self.done)
                )

    def run(self, number: int, hook: type[StatisticsHook] | None, *, keep: bool) -> Layers:
        """Run all batches through a layer that has its weights; if `keep`, keep its outputs for the
        next layer. Returns the sums that `hook` collects in a layer with routed experts; empty for
        others and without a hook."""
        with self.observer(number, hook) as observer:
            for index in range(len(self.batches)):
                output = self.read(number, index, self.entering(number, index), observer)
                if keep:
                    self.states.put(number + 1, index, output)
            return _sums(observer)

    def observer(self, number: int, hook: type[StatisticsHook] | None) -> Observer:
        """Observes the layer by `hook` while open, if it has routed experts."""
        layers = (
            [self.streamed.moe[number]] if hook is not None and number in self.streamed.moe else []
        )
        return Observer(self.streamed.model, hook or StatisticsHook, layers=layers)

    def entering(self, number: int, index: int) -> torch.Tensor | None:
        """The input of a layer (B, S, H); None for the first layer, which reads the embeddings."""
        return self.states.get(number, index, self.streamed.device) if number else None

    def read(
        self, number: int, index: int, state: torch.Tensor | None, observer: Observer
    ) -> torch.Tensor:
        """Run the layer on one batch, with `state` as its input, and return its output (B, S,
        H)."""
        self.save_if_due()
        ids, valid = self.batches[index]
        output: torch.Tensor = observer.read(
            ids, valid, lambda *_: self.streamed.through(number, ids, valid, state)
        )
        return output


def _sums(observer: Observer) -> Layers:
    """The sums over the batches read; empty where nothing was observed."""
    layers = observer.layers()
    check_finite(layers, "all batches")
    return layers


def _gradient_at_head(
    streamed: StreamedModel, ids: torch.Tensor, valid: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """The gradient of the loss, times LOSS_SCALE, at the output of the last decoder layer, (B, S,
    H)."""
    leaf = state.requires_grad_()
    with ExitStack() as undo:
        for layer in streamed.layers:
            stand_in(layer, leaf, undo)
        forward_and_backward(streamed.model, ids, valid)
    assert leaf.grad is not None
    return leaf.grad
