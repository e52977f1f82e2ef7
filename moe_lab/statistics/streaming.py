"""Calibrate models larger than the memory: one layer after the other is loaded and reads all
batches, so that a pass reads the checkpoint once.

A layer is run by the model's own code: the layers below it return stored outputs, the layers above
it are not run.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch

from moe_lab import progress
from moe_lab.machine import main_memory
from moe_lab.models.discover import MoELayer
from moe_lab.models.experts import replace_output
from moe_lab.models.load import backward
from moe_lab.models.streamed import StreamedModel
from moe_lab.statistics import Layers, Statistics, check_finite, read
from moe_lab.statistics.gradients import check_loss, differentiable, forward_and_backward
from moe_lab.statistics.observe import (
    Batch,
    Observer,
    SaveTimer,
    StatisticsHook,
    load_checkpoint,
    pass_header,
    save_checkpoint,
)

SHARE = 0.5
"""Share of the main memory of a process that hidden states may take."""


class States:
    """Stores states: tensors that one decoder layer passes to the next one, forward or backward. A
    state is in memory or in a file.

    Key n: the input of layer n. If n is the number of layers: the output of the last layer. Key -n:
    LOSS_SCALE times the gradient of the loss with respect to the state of key n.
    """

    def __init__(self, folder: Path) -> None:
        """Files in `folder` of a pass that was interrupted are used again."""
        self.folder = folder
        self.room = SHARE * main_memory()
        """Bytes of main memory that further states may take."""
        self.in_memory: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
        """Key -> batch -> state."""
        self.saved = {int(path.name) for path in folder.glob("*")}
        """Keys whose states all had files after the last save. A killed pass resumes from these."""
        self.retained = self.saved
        """Keys whose states the pass needs from now on."""

    def put(self, key: int, batch: int, state: torch.Tensor) -> None:
        """Store `state`, detached, in memory if there is room for it, otherwise in a file."""
        if _bytes(state) <= self.room:
            try:
                memory = torch.empty(state.shape, dtype=state.dtype, pin_memory=state.is_cuda)
            except RuntimeError:  # no memory is free, because other processes use it, too
                self.room = 0.0
            else:
                self.room -= _bytes(state)
                self.in_memory[key][batch] = memory.copy_(state.detach(), non_blocking=True)
                return
        self._write(key, batch, state)

    def get(self, key: int, batch: int, device: str) -> torch.Tensor:
        """A copy of the stored state, on `device`."""
        state: torch.Tensor | None = self.in_memory[key].get(batch)
        if state is None:
            state = read(self._file(key, batch), framework="pt")[key][str(batch)]
        # copied even if the device stays the same: a tensor from a file may have another alignment
        # in memory than other tensors, and then matrix products round differently
        return state.to(device, copy=True, non_blocking=True)

    def retain(self, keys: Iterable[int]) -> None:
        """Drop the states of all keys except `keys`."""
        dropped = self.retained.difference(keys)
        self.retained = set(keys)
        for key in dropped:
            self.room += sum(map(_bytes, self.in_memory.pop(key, {}).values()))
        # the files of the keys `saved` stay: a pass that is killed before its next save needs them
        self._delete(dropped - self.saved)

    def save(self, save_sums: Callable[[], None]) -> None:
        """Write the retained states to files, then save the sums of the pass with `save_sums`, then
        delete the files of dropped states. In this order, a pass can resume whenever it is
        killed."""
        for key in self.retained:
            for batch, state in self.in_memory[key].items():
                if not self._file(key, batch).exists():
                    self._write(key, batch, state)
        save_sums()
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
    """Bytes that a state takes in main memory. Pinned memory, in which states from a GPU are
    stored, is taken in powers of two."""
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
    """The sums that hooks of the class `hook` collect in a forward pass over `batches`, as in
    `collect_statistics`, but with one decoder layer in memory at a time.

    The hidden states of all batches may take SHARE of the main memory; further states are written
    to files in the folder `out`. An interrupted pass resumes after the last layer in the saved
    sums. `layer_context(layer)`: a context in which this MoE layer is run, such as a mask.
    """
    layer_pass = LayerPass(streamed, batches, hook.kind, total=len(streamed.layers), out=out)
    with layer_pass.running():
        for number in range(layer_pass.done, len(streamed.layers)):
            context = (
                layer_context(streamed.moe_layers[number])
                if number in streamed.moe_layers
                else nullcontext()
            )
            with streamed.layer(number, next_number=number + 1), torch.no_grad(), context:
                sums = layer_pass.run(number, hook, keep=number + 1 < len(streamed.layers))
            layer_pass.finish(sums, [number + 1])
    return layer_pass.result()


def stream_gradients(
    streamed: StreamedModel, hook: type[StatisticsHook], batches: Sequence[Batch], *, out: Path
) -> Statistics:
    """The sums that hooks of the class `hook` collect in a forward and a backward pass, as in
    `collect_gradient_statistics`, but with one decoder layer in memory at a time.

    Files in `out` and resuming are as in `stream`. The backward pass runs each layer forward again,
    because the forward pass kept no activations inside it.
    """
    check_loss(batches)
    first_moe = min(streamed.moe_layers)
    n_layers = len(streamed.layers)
    # parts of the pass: n_layers layers forward, the loss, and n_layers - first_moe layers backward
    layer_pass = LayerPass(
        streamed,
        batches,
        hook.kind,
        total=2 * n_layers + 1 - first_moe,
        out=out,
    )
    with layer_pass.running():
        for number in range(layer_pass.done, n_layers):
            with streamed.layer(number, next_number=number + 1), torch.no_grad():
                layer_pass.run(number, hook=None, keep=True)
            # the inputs of the layers from `first_moe` on, and the output of this layer
            layer_pass.finish({}, range(min(first_moe, number + 1), number + 2))
        with differentiable(streamed.model):
            if layer_pass.done == n_layers:
                for index, (ids, valid) in enumerate(batches):
                    layer_pass.save_if_due()
                    output = layer_pass.states.get(n_layers, index, streamed.device)
                    layer_pass.states.put(
                        -n_layers, index, _gradient_at_head(streamed, ids, valid, output)
                    )
                layer_pass.finish({}, [*range(first_moe, n_layers), -n_layers])
            # `done` is n_layers + 1 after the loss: the loop begins with the layer n_layers - 1
            for number in range(2 * n_layers - layer_pass.done, first_moe - 1, -1):
                with (
                    streamed.layer(number, next_number=number - 1 if number > first_moe else -1),
                    layer_pass.observer(number, hook) as observer,
                ):
                    for index in range(len(batches)):
                        state = layer_pass.layer_input(number, index)
                        if state is not None:
                            state.requires_grad_()
                        output = layer_pass.run_batch(number, index, state, observer)
                        gradient = layer_pass.states.get(-(number + 1), index, streamed.device)
                        backward(streamed.model, output, gradient)
                        # the layers before `first_moe` have no experts, and need no gradient
                        if number > first_moe and state is not None and state.grad is not None:
                            layer_pass.states.put(-number, index, state.grad)
                    sums = _sums(observer)
                layer_pass.finish(sums, [*range(first_moe, number), -number])
    return layer_pass.result()


class LayerPass:
    """Runs all batches through a streamed model, one decoder layer after the other.

    The pass has `total` parts. A part is one layer forward, one layer backward, or the loss, each
    for all batches. `kind`: the kind of its sums.
    """

    def __init__(
        self,
        streamed: StreamedModel,
        batches: Sequence[Batch],
        kind: str,
        total: int,
        out: Path,
    ) -> None:
        """Read the sums and states that the same pass saved in `out` when it was interrupted. Those
        of any other pass are deleted. Errors as from `pass_header`."""
        self.streamed = streamed
        self.batches = batches
        self.header = pass_header(streamed.model, batches, kind)
        self.total = total
        self.folder = out / "streamed"
        self.done, self.sums = load_checkpoint(self.folder, self.header)
        if not self.done:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.states = States(self.folder / "states")
        self.timer = SaveTimer(self.folder)

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which the parts run."""
        try:
            with self.timer:
                yield
        finally:
            self.states.in_memory.clear()
            if torch.cuda.is_initialized():
                # pinned memory, which torch caches when tensors are freed
                torch.accelerator.empty_host_cache()

    def finish(self, sums: Layers, keys: Iterable[int]) -> None:
        """Record that a part with the sums `sums` is done. `keys`: keys of the states that are
        needed from now on."""
        self.sums |= sums
        self.done += 1
        self.states.retain(keys)
        progress.update(self.done, self.total, "layers")
        self.save_if_due()

    def result(self) -> Statistics:
        """The sums of all MoE layers."""
        return Statistics(
            {number: self.sums[number] for number in sorted(self.streamed.moe_layers)},
            self.header,
        )

    def save_if_due(self) -> None:
        """Save the states and sums if `SaveTimer` says so."""
        if self.timer.is_due():
            with self.timer.saving():
                if self.streamed.device != "cpu":
                    # states are still being copied to main memory
                    torch.accelerator.current_stream(self.streamed.device).synchronize()
                self.states.save(
                    lambda: save_checkpoint(self.folder, self.sums, self.header, self.done)
                )

    def run(self, number: int, hook: type[StatisticsHook] | None, *, keep: bool) -> Layers:
        """Run all batches through the layer `number`, whose weights are loaded, and return the sums
        that `hook` collects. If `keep`, store the layer's outputs as the inputs of the next
        layer."""
        with self.observer(number, hook) as observer:
            for index in range(len(self.batches)):
                output = self.run_batch(number, index, self.layer_input(number, index), observer)
                if keep:
                    self.states.put(number + 1, index, output)
            return _sums(observer)

    def observer(self, number: int, hook: type[StatisticsHook] | None) -> Observer:
        """An observer of the layer `number`, or of no layer if `hook` is None or the layer has no
        routed experts."""
        layers = []
        if hook is not None and number in self.streamed.moe_layers:
            layers = [self.streamed.moe_layers[number]]
        # the class matters only if there is a layer to observe
        return Observer(self.streamed.model, hook or StatisticsHook, layers=layers)

    def layer_input(self, number: int, index: int) -> torch.Tensor | None:
        """The stored input (B, S, H) of the layer `number` for the batch `index`. None for layer 0,
        whose input is computed from the tokens."""
        return self.states.get(number, index, self.streamed.device) if number else None

    def run_batch(
        self, number: int, index: int, state: torch.Tensor | None, observer: Observer
    ) -> torch.Tensor:
        """The output (B, S, H) of the layer `number` for the batch `index`. `state` (B, S, H): the
        layer's input; None: the embeddings of the tokens."""
        self.save_if_due()
        ids, valid = self.batches[index]
        output: torch.Tensor = observer.run_batch(
            ids, valid, lambda *_: self.streamed.run_layer(number, ids, valid, state)
        )
        return output


def _sums(observer: Observer) -> Layers:
    """The sums of an observer that has read all batches. UserError unless all sums are finite."""
    layers = observer.layers()
    check_finite(layers, "all batches", observer.model.dtype)
    return layers


def _gradient_at_head(
    streamed: StreamedModel, ids: torch.Tensor, valid: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """LOSS_SCALE times the gradient (B, S, H) of the loss with respect to `state` (B, S, H), the
    output of the last decoder layer.

    No layer has its weights in memory here. So each layer is made to return `state`.
    """
    leaf = state.requires_grad_()
    with ExitStack() as undo:
        for layer in streamed.layers:
            replace_output(layer, leaf, undo)
        forward_and_backward(streamed.model, ids, valid)
    assert leaf.grad is not None
    return leaf.grad
