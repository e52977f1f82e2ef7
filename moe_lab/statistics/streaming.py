"""Calibrate models larger than the memory: one layer after the other is loaded and reads all
batches, so that a pass reads the checkpoint once.

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
from moe_lab.models.experts import bypass
from moe_lab.models.streamed import StreamedModel
from moe_lab.statistics import Layers, Statistics, check_finite, read
from moe_lab.statistics.gradients import check_loss, differentiable, forward_and_backward
from moe_lab.statistics.observe import (
    Batch,
    Observer,
    SaveTimer,
    StatisticsHook,
    pass_header,
    resume,
    save_checkpoint,
)

SHARE = 0.5
"""Share of the main memory of a process that hidden states may take."""


class States:
    """A tensor for each (key, batch), in memory as far as there is room, otherwise in a file.

    Key n stands for the inputs of layer n. The number after the last layer stands for the output of
    the last layer. Key -n stands for the gradients of the loss at the inputs of layer n.
    """

    def __init__(self, folder: Path) -> None:
        """`folder`: has a folder of files for each key, from earlier runs of the pass, too."""
        self.folder = folder
        self.room = SHARE * main_memory()
        """Bytes of main memory that are left for states."""
        self.in_memory: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
        """Key -> batch -> state."""
        self.saved = {int(path.name) for path in folder.glob("*")}
        """Keys whose states are in files, from which a killed pass resumes."""
        self.retained = self.saved
        """Keys whose states the pass needs from now on."""

    def put(self, key: int, batch: int, state: torch.Tensor) -> None:
        """Store `state`, detached, in memory if there is room for it, otherwise in a file."""
        if _bytes(state) <= self.room:
            try:
                memory = torch.empty(state.shape, dtype=state.dtype, pin_memory=state.is_cuda)
            except RuntimeError:  # other processes use the memory, too
                self.room = 0.0
            else:
                self.room -= _bytes(state)
                self.in_memory[key][batch] = memory.copy_(state.detach())
                return
        self._write(key, batch, state)

    def get(self, key: int, batch: int, device: str) -> torch.Tensor:
        """A copy of the stored state, on `device`."""
        state: torch.Tensor | None = self.in_memory[key].get(batch)
        if state is None:
            state = read(self._file(key, batch), "pt")[key][str(batch)]
        # a copy, because rows in the mapped file may start where matrix products round differently
        return state.to(device, copy=True)

    def retain(self, keys: Iterable[int]) -> None:
        """Drop the states of all keys except `keys`, which the pass needs from now on."""
        dropped = self.retained.difference(keys)
        self.retained = set(keys)
        for key in dropped:
            self.room += sum(map(_bytes, self.in_memory.pop(key, {}).values()))
        # a killed pass would resume from the files of `saved`: they stay until the next save
        self._delete(dropped - self.saved)

    def save(self, record: Callable[[], None]) -> None:
        """Write the retained states to files, call `record`, and delete the files of all other
        states."""
        for key in self.retained:
            for batch, state in self.in_memory[key].items():
                if not self._file(key, batch).exists():
                    self._write(key, batch, state)
        record()
        self._delete(self.saved - self.retained)
        self.saved = self.retained

    def _delete(self, keys: Iterable[int]) -> None:
        """Delete the files of the states of `keys`."""
        for key in keys:
            shutil.rmtree(self.folder / str(key), ignore_errors=True)

    def _write(self, key: int, batch: int, state: torch.Tensor) -> None:
        Statistics({key: {str(batch): state.detach().cpu()}}).save(self._file(key, batch))

    def _file(self, key: int, batch: int) -> Path:
        return self.folder / str(key) / f"{batch}.safetensors"


def _bytes(state: torch.Tensor) -> int:
    """Bytes that a state takes in main memory. A state from a GPU is stored in pinned memory, which
    is allocated in powers of two."""
    if state.is_cuda or state.is_pinned():
        return 1 << (state.nbytes - 1).bit_length()
    return state.nbytes


def stream(
    streamed: StreamedModel,
    hook: type[StatisticsHook],
    batches: Sequence[Batch],
    *,
    out: Path,
    layer_context: Callable[[MoELayer], AbstractContextManager[None]] = lambda layer: nullcontext(),
) -> Statistics:
    """The sums that `hook` collects in a forward pass, as in `gather`, with one decoder layer in
    memory at a time.

    Hidden states of all batches are kept in main memory, up to the share SHARE of it; further
    hidden states are kept in the folder `out`. The pass also saves its sums there, when `SaveTimer`
    says so. An interrupted pass resumes after the layer that was finished at the last save.
    `layer_context(layer)`: a context in which this MoE layer is run, such as a mask.
    """
    layer_pass = LayerPass(
        streamed,
        batches,
        pass_header(streamed.model, batches, hook.kind),
        len(streamed.layers),
        out,
    )
    with layer_pass.running():
        for number in range(layer_pass.done, len(streamed.layers)):
            context = (
                layer_context(streamed.moe[number]) if number in streamed.moe else nullcontext()
            )
            with streamed.layer(number, next_number=number + 1), torch.no_grad(), context:
                sums = layer_pass.run(number, hook, keep=number + 1 < len(streamed.layers))
            layer_pass.finish(sums, [number + 1])
    return layer_pass.result()


def stream_back(
    streamed: StreamedModel, hook: type[StatisticsHook], batches: Sequence[Batch], *, out: Path
) -> Statistics:
    """The sums that `hook` collects in a forward and a backward pass, with one decoder layer in
    memory at a time.

    The sums are those of `gather_gradients`; arguments and resuming are as in `stream`. The forward
    pass goes through all layers. It keeps the inputs of the first MoE layer and of all layers after
    it. The backward pass goes from the last layer to the first MoE layer, and runs each of these
    layers once more.
    """
    check_loss(batches)
    first = min(streamed.moe)
    n_layers = len(streamed.layers)
    # parts of the pass: `n_layers` layers forward, the loss, the layers from `first` on backward
    layer_pass = LayerPass(
        streamed,
        batches,
        pass_header(streamed.model, batches, hook.kind),
        2 * n_layers + 1 - first,
        out,
    )
    with layer_pass.running():
        for number in range(layer_pass.done, n_layers):
            with streamed.layer(number, next_number=number + 1), torch.no_grad():
                layer_pass.run(number, None, keep=True)
            # keep the inputs of the layers from `first` on, and the output of this layer
            layer_pass.finish({}, range(min(first, number + 1), number + 2))
        with differentiable(streamed.model):
            if layer_pass.done == n_layers:
                for index, (ids, valid) in enumerate(batches):
                    layer_pass.save_if_due()
                    output = layer_pass.states.get(n_layers, index, streamed.device)
                    layer_pass.states.put(
                        -n_layers, index, _gradient_at_head(streamed, ids, valid, output)
                    )
                layer_pass.finish({}, [*range(first, n_layers), -n_layers])
            # `done` is n_layers + 1 after the loss, so the first layer here is n_layers - 1
            for number in range(2 * n_layers - layer_pass.done, first - 1, -1):
                with (
                    streamed.layer(number, next_number=number - 1),
                    layer_pass.observer(number, hook) as observer,
                ):
                    for index in range(len(batches)):
                        state = layer_pass.layer_input(number, index)
                        if state is not None:
                            state.requires_grad_()
                        output = layer_pass.read(number, index, state, observer)
                        output.backward(
                            layer_pass.states.get(-(number + 1), index, streamed.device)
                        )
                        # the layers before `first` have no experts, and need no gradient
                        if number > first and state is not None and state.grad is not None:
                            layer_pass.states.put(-number, index, state.grad)
                    sums = _sums(observer)
                layer_pass.finish(sums, [*range(first, number), -number])
    return layer_pass.result()


class LayerPass:
    """Runs all batches through a streamed model, one decoder layer after the other.

    `header` describes the pass. The pass has `total` parts, such as a layer in one direction. If it
    was interrupted, it resumes after the parts that were done at its last save in the folder `out`.
    """

    def __init__(
        self,
        streamed: StreamedModel,
        batches: Sequence[Batch],
        header: Mapping[str, Any],
        total: int,
        out: Path,
    ) -> None:
        """Read the sums and states of an interrupted pass with the same `header` from `out`;
        delete those of any other pass."""
        self.streamed = streamed
        self.batches = batches
        self.header = header
        self.total = total
        self.folder = out / "streamed"
        self.done, self.sums = resume(self.folder, header)
        if not self.done:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.states = States(self.folder / "states")
        self.timer = SaveTimer(self.folder)

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which the parts run; its end frees the memory of the states."""
        try:
            with self.timer:
                yield
        finally:
            self.states.in_memory.clear()
            if torch.cuda.is_initialized():
                torch.accelerator.empty_host_cache()  # torch caches pinned memory

    def finish(self, sums: Layers, keys: Iterable[int]) -> None:
        """Record that a part is done. `sums`: the sums of this part. `keys`: keys of the states
        that are needed from now on."""
        self.sums |= sums
        self.done += 1
        self.states.retain(keys)
        progress.update(self.done, self.total, "layers")
        self.save_if_due()

    def result(self) -> Statistics:
        """The sums of all MoE layers."""
        return Statistics(
            {number: self.sums[number] for number in sorted(self.streamed.moe)}, dict(self.header)
        )

    def save_if_due(self) -> None:
        """Save the states and sums if `SaveTimer` says so."""
        if self.timer.due():
            with self.timer.saving():
                self.states.save(
                    lambda: save_checkpoint(self.folder, self.sums, self.header, self.done)
                )

    def run(self, number: int, hook: type[StatisticsHook] | None, *, keep: bool) -> Layers:
        """Run all batches through the layer `number`, whose weights are loaded, and return the sums
        that `hook` collects: {} if `hook` is None or the layer has no routed experts. If `keep`,
        store the layer's outputs as the inputs of the next layer."""
        with self.observer(number, hook) as observer:
            for index in range(len(self.batches)):
                output = self.read(number, index, self.layer_input(number, index), observer)
                if keep:
                    self.states.put(number + 1, index, output)
            return _sums(observer)

    def observer(self, number: int, hook: type[StatisticsHook] | None) -> Observer:
        """An observer of the layer `number` with `hook`. It observes no layer if `hook` is None or
        the layer has no routed experts."""
        layers = []
        if hook is not None and number in self.streamed.moe:
            layers = [self.streamed.moe[number]]
        return Observer(self.streamed.model, hook or StatisticsHook, layers=layers)

    def layer_input(self, number: int, index: int) -> torch.Tensor | None:
        """The input of the layer `number` for the batch `index`, (B, S, H); None for the first
        layer, which reads the embeddings."""
        return self.states.get(number, index, self.streamed.device) if number else None

    def read(
        self, number: int, index: int, state: torch.Tensor | None, observer: Observer
    ) -> torch.Tensor:
        """The output (B, S, H) of the layer `number` for the batch `index`, with `state` as its
        input; None: the embeddings. `observer` observes the layer."""
        self.save_if_due()
        ids, valid = self.batches[index]
        output: torch.Tensor = observer.read(
            ids, valid, lambda *_: self.streamed.run_layer(number, ids, valid, state)
        )
        return output


def _sums(observer: Observer) -> Layers:
    """Layer -> name -> sum over all batches; {} if the observer has no layer. UserError unless all
    sums are finite."""
    layers = observer.layers()
    check_finite(layers, "all batches")
    return layers


def _gradient_at_head(
    streamed: StreamedModel, ids: torch.Tensor, valid: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """LOSS_SCALE times the gradient (B, S, H) of the loss at `state` (B, S, H), the output of the
    last decoder layer. No layer has its weights here, so all layers are bypassed: the model only
    computes what follows the last layer."""
    leaf = state.requires_grad_()
    with ExitStack() as undo:
        for layer in streamed.layers:
            bypass(layer, leaf, undo)
        forward_and_backward(streamed.model, ids, valid)
    assert leaf.grad is not None
    return leaf.grad
