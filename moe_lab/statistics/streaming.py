"""Calibrate models larger than the memory: each layer in turn reads all batches; a pass reads the checkpoint once.

A layer is run by the model's own code: the layers below it return stored outputs, the layers above it are not run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from moe_lab import progress
from moe_lab.json_files import Damaged, read_json, write_json
from moe_lab.models.discover import MoELayer
from moe_lab.models.experts import stand_in
from moe_lab.models.streamed import StreamedModel
from moe_lab.statistics import Layers, Statistics, check_finite
from moe_lab.statistics.gradients import check_loss, differentiable, forward_and_backward
from moe_lab.statistics.observe import Batch, Observer, Tap, description


class States:
    """Stores a tensor for each (place, batch) in a file, from which a pass can be resumed. A place is the number of a
    layer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, place: int, batch: int, state: torch.Tensor) -> None:
        """Save `state`, detached."""
        file = self._file(place, batch)
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_suffix(".partial")
        save_file({"state": state.detach().cpu().contiguous()}, beside)
        beside.chmod(file.parent.stat().st_mode & 0o666)
        beside.replace(file)

    def get(self, place: int, batch: int, device: str) -> torch.Tensor:
        """The saved state, on `device`."""
        # a copy, because rows in the mapped file may start where matrix products round differently
        return load_file(self._file(place, batch))["state"].to(device, copy=True)

    def drop(self, place: int) -> None:
        """Delete the states of all batches at a place."""
        shutil.rmtree(self.folder / str(place), ignore_errors=True)

    def _file(self, place: int, batch: int) -> Path:
        return self.folder / str(place) / f"{batch}.safetensors"


def stream(
    streamed: StreamedModel,
    tap: type[Tap],
    batches: Sequence[Batch],
    *,
    out: Path,
    fingerprint: Mapping[str, Any],
    under: Callable[[MoELayer], AbstractContextManager[None]] = lambda layer: nullcontext(),
) -> Statistics:
    """Sum what `tap` collects in a forward pass, as `gather` does, with one decoder layer in memory. Hidden states of
    all batches are kept in the folder `out`. An interrupted pass resumes after its last finished layer. `under`: a
    context in which a layer is run, such as a mask."""
    finished = FinishedLayers(out, description(batches, tap.kind, fingerprint), len(streamed.layers))
    rows = LayerPass(streamed, batches, finished.folder / "states")
    for number in finished.missing("forward", range(len(streamed.layers))):
        changed = under(streamed.moe[number]) if number in streamed.moe else nullcontext()
        with streamed.layer(number, then=number + 1), torch.no_grad(), changed:
            sums = rows.run(number, tap, keep=number + 1 < len(streamed.layers))
        finished.add("forward", number, sums)
        rows.states.drop(number)
    return finished.result(streamed)


def stream_back(
    streamed: StreamedModel, tap: type[Tap], batches: Sequence[Batch], *, out: Path, fingerprint: Mapping[str, Any]
) -> Statistics:
    """Sum what `tap` collects in a forward and a backward pass, with one decoder layer in memory. The sums are those of
    `gather_gradients`; arguments and resuming are as in `stream`. The forward pass goes through all layers and keeps
    the input of each. The backward pass goes from the last layer to the first MoE layer, and runs each of them once
    more."""
    check_loss(batches)
    first, last = min(streamed.moe), len(streamed.layers)
    finished = FinishedLayers(out, description(batches, tap.kind, fingerprint), 2 * last + 1 - first)
    rows = LayerPass(streamed, batches, finished.folder / "states")
    gradients = States(finished.folder / "gradients")
    for number in finished.missing("forward", range(last)):
        with streamed.layer(number, then=number + 1), torch.no_grad():
            rows.run(number, None, keep=True)
        finished.add("forward", number, {})
        if number < first:
            rows.states.drop(number)
    with differentiable(streamed.model):
        for _ in finished.missing("head", [last]):
            for index, (ids, valid) in enumerate(batches):
                output = rows.states.get(last, index, streamed.device)
                gradients.put(last, index, _gradient_at_head(streamed, ids, valid, output))
            finished.add("head", last, {})
        for number in finished.missing("backward", reversed(range(first, last))):
            with streamed.layer(number, then=number - 1), rows.observer(number, tap) as observer:
                for index in range(len(batches)):
                    state = rows.entering(number, index)
                    if state is not None:
                        state.requires_grad_()
                    output = rows.read(number, index, state, observer)
                    output.backward(gradients.get(number + 1, index, streamed.device))
                    if number > first and state is not None and state.grad is not None:
                        gradients.put(number, index, state.grad)
                sums = _sums(observer)
            finished.add("backward", number, sums)
            rows.states.drop(number + 1)
            gradients.drop(number + 1)
    return finished.result(streamed)


class LayerPass:
    """Runs all batches through a streamed model, one decoder layer after the other."""

    def __init__(self, streamed: StreamedModel, batches: Sequence[Batch], folder: Path) -> None:
        self.streamed, self.batches = streamed, batches
        self.states = States(folder)
        """(layer, batch) -> the layer's input (B, S, H); the number after the last layer holds the final output."""

    def run(self, number: int, tap: type[Tap] | None, *, keep: bool) -> Layers:
        """Run all batches through a layer that has its weights; if `keep`, save its outputs for the next layer. Returns
        the sums that `tap` collects in a layer with routed experts; empty for others and without a tap."""
        with self.observer(number, tap) as observer:
            for index in range(len(self.batches)):
                output = self.read(number, index, self.entering(number, index), observer)
                if keep:
                    self.states.put(number + 1, index, output)
            return _sums(observer)

    def observer(self, number: int, tap: type[Tap] | None) -> AbstractContextManager[Observer | None]:
        """Observe the layer by `tap` while open, if it has routed experts."""
        if tap is None or number not in self.streamed.moe:
            return nullcontext()
        return Observer(self.streamed.model, tap, layers=[self.streamed.moe[number]])

    def entering(self, number: int, index: int) -> torch.Tensor | None:
        """The input of a layer (B, S, H); None for the first layer, which reads the embeddings."""
        return self.states.get(number, index, self.streamed.device) if number else None

    def read(self, number: int, index: int, state: torch.Tensor | None, observer: Observer | None) -> torch.Tensor:
        """Run the layer on one batch, with `state` as its input, and return its output (B, S, H)."""
        ids, valid = self.batches[index]
        if observer is None:
            return self.streamed.through(number, ids, valid, state)
        output: torch.Tensor = observer.read(ids, valid, lambda *_: self.streamed.through(number, ids, valid, state))
        return output


def _sums(observer: Observer | None) -> Layers:
    """The sums over the batches read; empty where nothing was observed."""
    layers = observer.layers() if observer else {}
    check_finite(layers, "all batches")
    return layers


def _gradient_at_head(
    streamed: StreamedModel, ids: torch.Tensor, valid: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """The gradient of the loss, times LOSS_SCALE, at the output of the last decoder layer, (B, S, H)."""
    leaf = state.requires_grad_()
    with ExitStack() as undo:
        for layer in streamed.layers:
            stand_in(layer, leaf, undo)
        forward_and_backward(streamed.model, ids, valid)
    assert leaf.grad is not None
    return leaf.grad


class FinishedLayers:
    """Record of a pass in a folder: a file of sums per finished layer, and a list of the finished (phase, layer)."""

    def __init__(self, folder: Path, about: Mapping[str, Any], total: int) -> None:
        """Open the record of the pass that `about` describes; a record of another pass is removed."""
        self.folder, self.about, self.total = folder / "streamed", about, total
        self.list = self.folder / "finished.json"
        content: dict[str, Any] = {}
        with suppress(FileNotFoundError, Damaged):  # what cannot be read is computed again
            content = read_json(self.list, {"about": dict, "finished": [(str, int)]})
        if content.get("about") != self.about:
            shutil.rmtree(self.folder, ignore_errors=True)
            content = {}
        self.finished: list[list[Any]] = content.get("finished", [])
        self.folder.mkdir(parents=True, exist_ok=True)

    def missing(self, phase: str, numbers: Iterable[int]) -> list[int]:
        """The layers that are not finished in a phase, in their order."""
        return [number for number in numbers if [phase, number] not in self.finished]

    def add(self, phase: str, number: int, sums: Layers) -> None:
        """Save a layer's sums, then note that it is finished."""
        if sums:
            Statistics(sums, dict(self.about)).save(self._file(number))
        self.finished.append([phase, number])
        write_json(self.list, {"about": self.about, "finished": self.finished})
        progress.tell(len(self.finished), self.total, "layers")

    def result(self, streamed: StreamedModel) -> Statistics:
        """The sums of all MoE layers."""
        layers = {number: Statistics.load(self._file(number)).layers[number] for number in sorted(streamed.moe)}
        return Statistics(layers, dict(self.about))

    def _file(self, number: int) -> Path:
        return self.folder / f"sums-{number}.safetensors"
