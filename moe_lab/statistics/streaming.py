"""Calibration of models larger than the memory: layer after layer over all batches, the checkpoint read once a pass.

The model's own code runs, with what is below the layer standing in for its output and nothing above it run. So what is
computed, and in which order it is summed, is the same as when the whole model is there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from moe_lab.json_files import Damaged, read_json
from moe_lab.models.partial_forward import run, stand_in
from moe_lab.models.streamed import StreamedModel
from moe_lab.statistics.gradients import check_loss, differentiable, loss_gradient
from moe_lab.statistics.observe import Batch, Observer, Tap, description
from moe_lab.statistics.sums import Layers, Statistics, check_finite


class States:
    """(place, batch) -> a tensor.

    Every one is in a file, so that a pass can go on after it was killed; those that fit into `budget` bytes are kept in
    memory as well and are not read back.
    """

    def __init__(self, folder: Path, budget: float) -> None:
        self.folder, self.budget = folder, budget
        self._kept: dict[tuple[int, int], torch.Tensor] = {}

    def put(self, place: int, batch: int, state: torch.Tensor) -> None:
        """Keep `state`, detached, on its device if there is room."""
        state = state.detach()
        file = self._file(place, batch)
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_suffix(".partial")
        save_file({"state": state.cpu().contiguous()}, beside)
        beside.replace(file)
        if sum(kept.nbytes for kept in self._kept.values()) + state.nbytes <= self.budget:
            self._kept[place, batch] = state

    def get(self, place: int, batch: int, device: str) -> torch.Tensor:
        """The state as it was put, on `device`."""
        kept = self._kept.get((place, batch))
        return (load_file(self._file(place, batch))["state"] if kept is None else kept).to(device)

    def drop(self, place: int) -> None:
        """Forget all batches at a place."""
        self._kept = {key: state for key, state in self._kept.items() if key[0] != place}
        shutil.rmtree(self.folder / str(place), ignore_errors=True)

    def _file(self, place: int, batch: int) -> Path:
        return self.folder / str(place) / f"{batch}.safetensors"


def stream(
    streamed: StreamedModel,
    tap: type[Tap],
    batches: Sequence[Batch],
    *,
    kind: str,
    out: Path,
    fingerprint: Mapping[str, Any],
    budget: float,
) -> Statistics:
    """Sum what `tap` collects in a forward pass, as `read_all` does, with one decoder layer in memory.

    Hidden states of all batches are kept in the folder `out`, and in memory up to `budget` bytes. A pass that finds
    there what an interrupted one of the same kind, fingerprint and batches left goes on from its last finished layer.
    """
    work = _Work(out, description(batches, kind, fingerprint))
    states = States(work.folder / "states", budget)
    for number in work.missing("forward", range(len(streamed.layers))):
        with _layer(streamed, number, tap, batches, then=number + 1) as read, torch.no_grad():
            for index in range(len(batches)):
                result = read(index, _state(states, streamed, number, index))
                if number + 1 < len(streamed.layers):
                    states.put(number + 1, index, result)
            sums = read.sums()
        work.finish("forward", number, sums)
        states.drop(number)
    return work.result(streamed)


def stream_pruned(
    streamed: StreamedModel,
    tap: type[Tap],
    batches: Sequence[Batch],
    prune: Callable[[int, Mapping[str, torch.Tensor]], AbstractContextManager[None]],
    *,
    kind: str,
    out: Path,
    fingerprint: Mapping[str, Any],
    budget: float,
) -> Statistics:
    """Sum what `tap` collects where each layer reads the output of the pruned layers below; else as `stream`.

    After a layer with routed experts is read, `prune` is given its number and sums. In the context that it returns the
    layer runs once more, and that output is what the next layer reads.
    """
    work = _Work(out, description(batches, kind, fingerprint))
    states = States(work.folder / "states", budget)
    for number in work.missing("pruned", range(len(streamed.layers))):
        sums: Layers = {}
        with _weights(streamed, number, then=number + 1), torch.no_grad(), ExitStack() as pruned:
            if number in streamed.moe:
                with _reading(streamed, number, tap, batches) as read:
                    for index in range(len(batches)):
                        read(index, _state(states, streamed, number, index))
                    sums = read.sums()
                pruned.enter_context(prune(number, sums[number]))
            if number + 1 < len(streamed.layers):
                with _reading(streamed, number, None, batches) as read:
                    for index in range(len(batches)):
                        states.put(number + 1, index, read(index, _state(states, streamed, number, index)))
        work.finish("pruned", number, sums)
        states.drop(number)
    return work.result(streamed)


def stream_back(
    streamed: StreamedModel,
    tap: type[Tap],
    batches: Sequence[Batch],
    *,
    kind: str,
    out: Path,
    fingerprint: Mapping[str, Any],
    budget: float,
) -> Statistics:
    """Sum what `tap` collects in a forward and a backward pass, with one decoder layer in memory.

    Channel sums are those of `gather_gradients`, SNIP's those of `gather_weight_gradients`; the rest is as in `stream`.
    Forward through all layers, keeping what enters each; then backward from the last to the first MoE layer, each of
    which runs once more.
    """
    check_loss(batches)
    work = _Work(out, description(batches, kind, fingerprint))
    states = States(work.folder / "states", budget / 2)
    gradients = States(work.folder / "gradients", budget / 2)
    first, last = min(streamed.moe), len(streamed.layers)
    for number in work.missing("forward", range(last)):
        with _layer(streamed, number, None, batches, then=number + 1) as read, torch.no_grad():
            for index in range(len(batches)):
                states.put(number + 1, index, read(index, _state(states, streamed, number, index)))
        work.finish("forward", number, {})
        if number < first:
            states.drop(number)
    with differentiable(streamed.model):
        for _ in work.missing("head", [last]):
            for index, (ids, valid) in enumerate(batches):
                gradients.put(last, index, _at_head(streamed, ids, valid, states.get(last, index, streamed.device)))
            work.finish("head", last, {})
        for number in work.missing("backward", reversed(range(first, last))):
            with _layer(streamed, number, tap, batches, then=number - 1) as read:
                for index in range(len(batches)):
                    state = _state(states, streamed, number, index)
                    leaf = None if state is None else state.requires_grad_()
                    read(index, leaf).backward(gradients.get(number + 1, index, streamed.device))
                    if number > first and leaf is not None and leaf.grad is not None:
                        gradients.put(number, index, leaf.grad)
                sums = read.sums()
            work.finish("backward", number, sums)
            states.drop(number + 1)
            gradients.drop(number + 1)
    return work.result(streamed)


def _state(states: States, streamed: StreamedModel, number: int, index: int) -> torch.Tensor | None:
    """What enters a layer; None for the first, which the embeddings feed."""
    return states.get(number, index, streamed.device) if number else None


class _Read:
    """Reads batches through one decoder layer, under observation if it has routed experts."""

    def __init__(self, streamed: StreamedModel, number: int, tap: type[Tap] | None, batches: Sequence[Batch]) -> None:
        self.streamed, self.number, self.batches = streamed, number, batches
        self.observer = None
        if tap is not None and number in streamed.moe:
            self.observer = Observer(streamed.model, tap, layers=[streamed.moe[number]], reading=self._run)
        self.state: torch.Tensor | None = None
        self.output: torch.Tensor | None = None

    def __call__(self, index: int, state: torch.Tensor | None) -> torch.Tensor:
        """What the layer makes of a batch (B, S, H), given what enters it."""
        ids, valid = self.batches[index]
        self.state = state
        if self.observer is None:
            self._run(self.streamed.model, ids, valid)
        else:
            self.observer.read(ids, valid)
        assert self.output is not None
        return self.output

    def _run(self, model: PreTrainedModel, ids: torch.Tensor, valid: torch.Tensor) -> None:
        self.output = self.streamed.through(self.number, ids, valid, self.state)

    def sums(self) -> Layers:
        """The layer's sums over the batches read; empty where it was not observed."""
        if self.observer is None:
            return {}
        layers = self.observer.layers()
        check_finite(layers, "all batches")
        return layers


@contextmanager
def _weights(streamed: StreamedModel, number: int, *, then: int) -> Iterator[None]:
    """The layer has its weights; those of the layer `then` are fetched meanwhile."""
    streamed.prefetch(number)
    streamed.prefetch(then)
    with streamed.layer(number):
        yield


@contextmanager
def _reading(streamed: StreamedModel, number: int, tap: type[Tap] | None, batches: Sequence[Batch]) -> Iterator[_Read]:
    """Read batches through a layer that has its weights."""
    read = _Read(streamed, number, tap, batches)
    with nullcontext() if read.observer is None else read.observer:
        yield read


@contextmanager
def _layer(
    streamed: StreamedModel, number: int, tap: type[Tap] | None, batches: Sequence[Batch], *, then: int
) -> Iterator[_Read]:
    """Read batches through a layer while it has its weights."""
    with _weights(streamed, number, then=then), _reading(streamed, number, tap, batches) as read:
        yield read


def _at_head(streamed: StreamedModel, ids: torch.Tensor, valid: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The gradient of the loss, times LOSS_SCALE, at the output of the last decoder layer, (B, S, H)."""
    leaf = state.requires_grad_()
    with ExitStack() as undo:
        for layer in streamed.layers:
            stand_in(layer, leaf, undo)
        output = run(streamed.model, ids, valid)
    states: torch.Tensor = output.last_hidden_state
    states.backward(loss_gradient(streamed.model, output, ids, valid))
    assert leaf.grad is not None
    return leaf.grad


class _Work:
    """What is finished, in a folder: a file of sums per layer, and a list that is replaced when one is added."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self.folder, self.about = folder / "streamed", json.loads(json.dumps(about))
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

    def finish(self, phase: str, number: int, sums: Layers) -> None:
        """Save a layer's sums, then note that it is finished."""
        if sums:
            Statistics(sums, self.about).save(self._file(number))
        self.finished.append([phase, number])
        beside = self.list.with_suffix(".partial")
        beside.write_text(json.dumps({"about": self.about, "finished": self.finished}))
        beside.replace(self.list)

    def result(self, streamed: StreamedModel) -> Statistics:
        """The sums of all MoE layers."""
        layers = {number: Statistics.load(self._file(number)).layers[number] for number in sorted(streamed.moe)}
        return Statistics(layers, dict(self.about))

    def _file(self, number: int) -> Path:
        return self.folder / f"sums-{number}.safetensors"
