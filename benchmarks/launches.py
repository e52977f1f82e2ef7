"""Kernels, bytes and time that passes would need on a GPU, counted on any machine:
`python -m benchmarks.launches`.

A decoder layer of a published configuration reads a batch on the device "meta", whose tensors have
shapes but no values: a pass that reads a value, for which a GPU would make the CPU wait, ends in an
error. A kernel is an operation of torch that is not a view, or a Triton kernel. Its bytes are those
of its distinct inputs and outputs; of a Triton kernel, those that it loads and stores, by a
formula. The estimate adds, kernel by kernel, the largest of three times: of its launch, of its
arithmetic and of its bytes, for an H100. It knows no caches and no fusion, so it is a model and not
a measurement: benchmarks.cuda measures.

Of the passes with statistics the second batch is counted; the first also allocates the sums. Exit
code 1 when a bar fails.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, register_flop_formula
from triton.runtime.jit import JITFunction

from benchmarks.measure import misses, parser
from benchmarks.models import CONFIGURATIONS, published_model
from benchmarks.statistics import batch as full_batch
from moe_lab.config import RecoveryConfig
from moe_lab.evaluation.engines import Row, likelihoods
from moe_lab.models import kernels
from moe_lab.models.discover import moe_layers
from moe_lab.models.experts import run
from moe_lab.pruning.alignment import alignment_hook
from moe_lab.pruning.layer_plan import LayerPlan
from moe_lab.pruning.mask import mask_layers
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune, share_copy
from moe_lab.pruning.selection import replace_by_constants
from moe_lab.recovery import dora
from moe_lab.recovery.merge_fit import MergeHook, merged_weights
from moe_lab.search.reconstruction import SubsetHook
from moe_lab.statistics.damage import DamageHook, SimilarityHook
from moe_lab.statistics.forward import ForwardHook
from moe_lab.statistics.gradients import (
    GradientHook,
    WeightGradientHook,
    differentiable,
    forward_and_backward,
)
from moe_lab.statistics.observe import Observer

FLOPS = 400e12
BANDWIDTH = 2.5e12
"""Operations in bf16 and bytes that an H100 reaches in a second."""
LAUNCH = 5e-6
"""Seconds between the starts of two kernels."""
VIEWS = frozenset(
    [
        "_unsafe_view",
        "alias",
        "as_strided",
        "chunk",
        "detach",
        "diagonal",
        "empty",
        "empty_like",
        "expand",
        "lift_fresh",
        "narrow",
        "new_empty",
        "permute",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unfold",
        "unsqueeze",
        "view",
    ]
)
"""Operations that start no kernel."""
GATHERS = ("embedding", "gather", "index", "index_select")
"""Operations that read as many bytes as they write, not all of their input."""
BEYOND_DAMAGE = 200
"""Most kernels of the pass with exact damage beyond the plain forward, in a layer."""
BEYOND_FUSED = 60
"""Most kernels of the forward statistics with Triton beyond the plain forward, in a layer."""
BYTES = 1.3
"""Most bytes of the forward statistics with Triton, as a multiple of those of the plain forward."""
TIME = 1.25
"""Most time of statistics and gradients, as a multiple of that of the plain pass."""
MEMORY = 1.1
"""Most memory of a pass beside its sums, weights of the whole model included, as a multiple of that
of the plain pass."""
EXPERTS = (16, 128)
"""Numbers of experts for which each pass is counted."""
BEYOND_FORWARD = 150
"""Most kernels of a pass beyond the plain forward, in a layer."""
BEYOND_BACKWARD = 120
"""Most kernels of a pass beyond the plain forward and backward, in a layer."""


@register_flop_formula(torch.ops.aten._grouped_mm)
def grouped_operations(left: Any, right: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Operations of a grouped product: of rows (S, M) with matrices (G, M, N), or of columns of
    (N, S) and (S, M), which gives (G, N, M)."""
    operations: int = 2 * left[-2] * left[-1] * right[-1]
    return operations


def bytes_of_sums(values: Any, factors: Any, ignored: Any, ends: Any, sums: Any, *_: Any) -> int:
    """Bytes that the kernel `_sums_by_expert` loads and stores, if no row is ignored."""
    blocks = -(-values.shape[1] // kernels.COLUMNS)
    kinds = len(sums)
    of_rows = sum(
        tensor.nbytes * n for tensor, n in ((factors, 1), (ignored, kinds)) if tensor is not None
    )
    of_ends = (2 * len(ends) - 1) * ends.element_size() * kinds
    return int(kinds * values.nbytes + blocks * (of_rows + of_ends) + 2 * sums.nbytes)


def bytes_of_products(left: Any, right: Any, right_rows: Any, products: Any, *_: Any) -> int:
    """Bytes that the kernel `_inner_products` loads and stores."""
    of_right = left.numel() * right.element_size()
    of_rows = 0 if right_rows is None else right_rows.nbytes
    return int(left.nbytes + of_right + of_rows + products.nbytes)


def bytes_of_shifts(xx: Any, xa: Any, aa: Any, shifts: Any, *_: Any) -> int:
    """Bytes that the kernel `_shifts` loads and stores."""
    return int(xx.nbytes + xa.nbytes + aa.nbytes + shifts.nbytes)


def bytes_of_outer_products(left: Any, right: Any, ends: Any, sums: Any, *_: Any) -> int:
    """Bytes that the kernel `_outer_products` loads and stores, if each row has an expert."""
    lines, columns = (-(-size // kernels.SIDE) for size in sums.shape[1:])
    of_ends = (2 * len(ends) - 1) * ends.element_size() * lines * columns
    return int(columns * left.nbytes + lines * right.nbytes + of_ends + sums.nbytes)


TRAFFIC: dict[str, Callable[..., int]] = {
    "_sums_by_expert": bytes_of_sums,
    "_outer_products": bytes_of_outer_products,
    "_inner_products": bytes_of_products,
    "_shifts": bytes_of_shifts,
}
"""Name of a Triton kernel -> its bytes, of its arguments."""


def operations_of_outer_products(left: Any, right: Any, *_: Any) -> int:
    """Operations of the kernel `_outer_products`, if each row has an expert."""
    return int(2 * left.numel() * right.shape[1])


class Launches(TorchDispatchMode):
    """Counts the kernels on the device "meta" while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0
        self.waits = 0
        """Copies to the CPU."""
        self.bytes = 0
        self.seconds = 0.0
        self.names: Counter[str] = Counter()
        self.memory = self.peak_memory = 0
        """Bytes of the tensors made since the start that still exist, and their maximum."""
        self._storages: set[int] = set()

    def __enter__(self) -> Launches:
        self._patches = ExitStack()
        for patched in (
            patch.object(torch.Tensor, "cpu", lambda tensor: self._copy_to_cpu(tensor)),
            patch.object(JITFunction, "run", lambda *inputs, **_: self._run(*inputs)),
        ):
            self._patches.enter_context(patched)
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._patches.close()

    def _run(self, kernel: Any, *inputs: Any) -> None:
        """Count a Triton kernel instead of running it."""
        name = kernel.fn.__name__
        is_product = kernel is kernels._outer_products
        operations = operations_of_outer_products(*inputs) if is_product else 0
        self._count(name, TRAFFIC[name](*inputs), operations)

    def _count(self, name: str, moved: int, operations: int = 0) -> None:
        """Count a kernel that moves so many bytes."""
        self.kernels += 1
        self.bytes += moved
        self.seconds += max(LAUNCH, operations / FLOPS, moved / BANDWIDTH)
        self.names[name] += 1

    def _copy_to_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        """Zeros of the shape of `tensor`."""
        self.waits += 1
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._hold(result)
        name = func.overloadpacket.__name__
        leaves = tree_leaves((args, kwargs, result))
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        if name in VIEWS or not any(tensor.is_meta for tensor in tensors.values()):
            return result
        moved = sum(tensor.nbytes for tensor in tensors.values())
        if name in GATHERS:
            moved = 2 * result.nbytes
        operations = 0
        if func.overloadpacket in flop_registry:
            operations = flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=result)
        elif name.endswith("mm"):
            raise NotImplementedError(f"the operations of {name} are not counted")
        self._count(name, moved, operations)
        return result

    def _hold(self, result: Any) -> None:
        """Count the memory of new tensors until they are freed."""
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._storages:
                    self._storages.add(key)
                    self.memory += storage.nbytes()
                    self.peak_memory = max(self.peak_memory, self.memory)
                    weakref.finalize(storage, self._free, key, storage.nbytes())

    def _free(self, key: int, size: int) -> None:
        self._storages.discard(key)
        self.memory -= size


class Pass(NamedTuple):
    """A pass that is counted."""

    name: str
    context: Callable[[Any], Any]
    """Function that opens the pass on a model, and gives the function that reads a batch."""
    plain: str
    """Name of the pass with which it is compared."""
    most: int
    """Most kernels beyond that pass."""
    has_padding: bool = False
    """Whether an eighth of the tokens does not count."""
    uses_triton: bool = True
    """Whether sums are Triton kernels, or else operations of torch."""
    most_time: float = math.inf
    """Most time, as a multiple of that of the pass `plain`."""
    most_bytes: float = math.inf
    """Most bytes, likewise."""


def main() -> int:
    """Count, print, compare with the bars; returns 1 when a bar fails."""
    options = parser("launches", __doc__)
    options.add_argument("--model", choices=CONFIGURATIONS, default="qwen3_30b")
    options.add_argument("--tokens", type=int, default=4096, help="tokens in the batch")
    options.add_argument("--kernels", action="store_true", help="print the kernels of each pass")
    arguments = options.parse_args()
    failed = False
    beyond: dict[str, list[int]] = {}
    for n_experts in EXPERTS:
        model = published_model(
            arguments.model, 1, "meta", vocabulary=1024, changes={"num_experts": n_experts}
        )
        layers = CONFIGURATIONS[arguments.model]["num_hidden_layers"]
        weights = layers * sum(tensor.nbytes for tensor in model.parameters())
        counts: dict[str, Launches] = {}
        for row in PASSES:
            counted = counts[row.name] = count(row, model, batch(row, arguments.tokens))
            plain = counts[row.plain]
            beyond.setdefault(row.name, []).append(counted.kernels - plain.kernels)
            seconds, moved, memory = (
                getattr(counted, figure) / getattr(plain, figure)
                for figure in ("seconds", "bytes", "peak_memory")
            )
            print(
                f"{n_experts} experts, {row.name}: {counted.kernels} kernels, "
                f"{counted.bytes / 1e9:.2f} GB, {1e3 * counted.seconds:.2f} ms; of {row.plain}: "
                f"bytes {moved:.2f}, time {seconds:.2f}, memory beside weights and sums "
                f"{memory:.2f}",
                flush=True,
            )
            failed |= misses(f"{row.name}: waits", counted.waits, "<=", 0)
            failed |= misses(f"{row.name}: time", seconds, "<=", row.most_time)
            failed |= misses(f"{row.name}: bytes", moved, "<=", row.most_bytes)
            failed |= misses(
                f"{row.name}: memory, with weights, without sums",
                (weights + counted.peak_memory) / (weights + plain.peak_memory),
                "<=",
                MEMORY,
            )
            if arguments.kernels:
                print(f"  {dict(counted.names.most_common())}")
        for questions in QUESTIONS:
            kernels, waits = count_likelihoods(model, questions)
            beyond.setdefault(LIKELIHOODS, []).append(kernels)
            failed |= misses(f"{LIKELIHOODS}: waits, {questions} questions", waits, "<=", 1)
    few, many = min(beyond[LIKELIHOODS]), max(beyond[LIKELIHOODS])
    failed |= misses(f"{LIKELIHOODS}: kernels beyond the forward", many, "<=", BEYOND_LIKELIHOODS)
    failed |= misses(f"{LIKELIHOODS}: kernels that depend on the rows", many - few, "<=", 0)
    for row in PASSES:
        few, many = beyond[row.name]
        failed |= misses(f"{row.name}: kernels beyond {row.plain}", many, "<=", row.most)
        failed |= misses(f"{row.name}: kernels that depend on the experts", many - few, "<=", 0)
    return int(failed)


def count_likelihoods(model: Any, questions: int) -> tuple[int, int]:
    """(kernels beyond the forward of the model, waits) of a pass over questions of 4 answers."""
    rows = [
        Row((question, *range(20), answer, answer), 21)
        for question in range(questions)
        for answer in range(4)
    ]
    launches = Launches()
    in_forward = 0

    def before(*_: Any) -> None:
        nonlocal in_forward
        in_forward -= launches.kernels

    def after(*_: Any) -> None:
        nonlocal in_forward
        in_forward += launches.kernels

    with ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(before).remove)
        stack.callback(model.register_forward_hook(after).remove)
        # whether answers can share a pass is found out by a trial, once for a model
        stack.enter_context(patch.object(likelihoods, "_can_share", lambda _: True))
        stack.enter_context(patch("transformers.masking_utils.is_tracing", lambda *_: True))
        stack.enter_context(launches)
        likelihoods.log_likelihoods(model, rows, 2 * questions)  # one pass
    return launches.kernels - in_forward, launches.waits


def batch(row: Pass, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids in 8 rows, and which of them count."""
    length = tokens // 8
    ids, valid = full_batch(8, length)
    if row.has_padding:
        valid[:, length * 7 // 8 :] = False
    return ids, valid


def count(row: Pass, model: Any, data: tuple[torch.Tensor, torch.Tensor]) -> Launches:
    """The kernels of the second batch of a pass."""
    # of exact damage, the number of experts that a token uses is read
    used = patch(
        "moe_lab.statistics.damage.most_used", lambda _: model.config.num_experts_per_tok + 1
    )
    # transformers reads values of the positions, unless the forward is traced
    traced = patch("transformers.masking_utils.is_tracing", lambda *_: True)
    # weights on the device "meta" are taken for offloaded ones
    patches = [
        patch(f"moe_lab.pruning.{module}.check_in_memory", lambda *_: None)
        for module in ("mask", "prune")
    ]
    devices = ("meta",) if row.uses_triton else ()
    fused = patch("moe_lab.models.rows.TRITON_DEVICES", devices)
    entries: list[Any] = [used, traced, fused, *patches]
    with ExitStack() as stack:
        for entry in entries:
            stack.enter_context(entry)
        read = stack.enter_context(row.context(model))
        # the first batch may read values, such as whether a router can be repeated
        equal = patch.object(torch, "equal", lambda *_: True)
        softmax = patch("moe_lab.statistics.forward.is_softmax", lambda *_: True)
        with equal, softmax, Launches() as first:
            read(*data)
        with Launches() as launches:
            read(*data)
            launches.peak_memory -= first.memory
    return launches


@contextmanager
def plain_forward(model: Any) -> Any:
    """The forward of the decoder."""
    with torch.no_grad():
        yield lambda ids, valid: run(model, ids, valid)


@contextmanager
def plain_backward(model: Any) -> Any:
    """Forward and backward with frozen weights."""
    with differentiable(model):
        yield lambda ids, valid: forward_and_backward(model, ids, valid)


def statistics(hook: Any) -> Callable[[Any], Any]:
    """The pass with the forward statistics of `hook`."""

    @contextmanager
    def opened(model: Any) -> Any:
        with torch.no_grad(), Observer(model, hook) as observer:
            yield observer.run_batch

    return opened


def gradients(hook: Any) -> Callable[[Any], Any]:
    """The pass with the gradient statistics of `hook`."""

    @contextmanager
    def opened(model: Any) -> Any:
        with differentiable(model), Observer(model, hook) as observer:
            yield lambda ids, valid: observer.run_batch(ids, valid, forward_and_backward)

    return opened


def plan_of(model: Any, kind: str) -> Plan:
    """A plan that drops half of the experts, or half of all channels, or merges pairs of experts,
    or replaces half of the experts by constants, or retains another number of channels of each
    expert."""
    plans = {}
    for layer in moe_layers(model):
        experts = tuple(range(layer.n_experts))
        channels = numpy.zeros((layer.n_experts, layer.width), dtype=bool)
        plan = LayerPlan(layer.n_experts, experts, channels)
        if kind == "experts":
            plan = LayerPlan(layer.n_experts, experts[::2])
        elif kind == "channels":
            channels[:, ::2] = True
        elif kind == "constants":
            constants = numpy.zeros((layer.n_experts, layer.hidden))
            plan = replace_by_constants(
                LayerPlan(layer.n_experts, experts[::2]), constants, layer.width
            )
        elif kind == "unequal widths":
            for expert in experts:
                channels[expert, expert % 16 * layer.width // 16 :] = True
        else:
            channels[::2] = True
            pairs = {owner: {owner: 0.5, owner + 1: 0.5} for owner in experts[::2]}
            plan = replace(plan, merged=pairs)
        plans[layer.index] = plan
    return Plan(plans, {})


def masked(kind: str) -> Callable[[Any], Any]:
    """The forward under a plan of `plan_of`."""

    @contextmanager
    def opened(model: Any) -> Any:
        with torch.no_grad(), mask_layers(moe_layers(model), plan_of(model, kind)):
            yield lambda ids, valid: run(model, ids, valid)

    return opened


@contextmanager
def unequal_experts(model: Any) -> Any:
    """The forward of a model that was pruned to experts of unequal width."""
    pruned = prune(model, plan_of(model, "unequal widths"))
    with torch.no_grad():
        yield lambda ids, valid: run(pruned, ids, valid)


def reconstruction(model: Any) -> Any:
    """The pass of NAEE over 15 choices of experts, which drop two neighbours each."""
    choices = {}
    for layer in moe_layers(model):
        experts = range(layer.n_experts)
        choices[layer.index] = [
            tuple(expert for expert in experts if expert not in (first, first + 1))
            for first in range(15)
        ]
    return statistics(type("Choices", (SubsetHook,), {"subsets": choices}))(model)


def alignment(model: Any) -> Any:
    """The pass that matches the channels of pairs of merged experts."""
    return statistics(alignment_hook(plan_of(model, "merged experts")))(model)


def merge_fit(model: Any) -> Any:
    """The pass that fits pairs of merged experts."""
    plan = plan_of(model, "merged experts")
    merged = merged_weights(prune(model, plan), plan)
    return statistics(type("Fit", (MergeHook,), {"plan": plan, "merged": merged}))(model)


@contextmanager
def adapters(model: Any) -> Any:
    """Forward and backward of fine-tuning: weights are frozen, adapters are not."""
    trained = share_copy(model).train()
    dora.attach(trained, RecoveryConfig(instructions="set"), seed=0)

    def read(ids: torch.Tensor, valid: torch.Tensor) -> None:
        forward_and_backward(trained, ids, valid)
        for parameter in trained.parameters():
            parameter.grad = None

    embeddings = trained.get_input_embeddings()
    embeddings.register_forward_hook(lambda module, arguments, result: result.requires_grad_())
    # on CUDA, dropout is one kernel
    with patch.object(dora, "dropout", lambda rows, p: torch.native_dropout(rows, p, True)[0]):
        yield read


LIKELIHOODS = "likelihoods"
QUESTIONS = (8, 32)
"""Numbers of questions in a pass."""
BEYOND_LIKELIHOODS = 20
"""Most kernels of a pass beyond the forward."""
FORWARD = "plain forward"
BACKWARD = "plain forward and backward"
PASSES = [
    Pass(FORWARD, plain_forward, FORWARD, 0),
    Pass(
        "statistics",
        statistics(ForwardHook),
        FORWARD,
        BEYOND_FUSED,
        most_time=TIME,
        most_bytes=BYTES,
    ),
    Pass(
        "statistics without Triton",
        statistics(ForwardHook),
        FORWARD,
        BEYOND_FORWARD,
        uses_triton=False,
    ),
    Pass(
        "statistics, an eighth is padding",
        statistics(ForwardHook),
        FORWARD,
        BEYOND_FUSED,
        has_padding=True,
        most_time=TIME,
        most_bytes=BYTES,
    ),
    Pass("exact damage", statistics(DamageHook), FORWARD, BEYOND_DAMAGE),
    Pass("similarity", statistics(SimilarityHook), FORWARD, BEYOND_FORWARD),
    Pass("choices of experts (NAEE)", reconstruction, FORWARD, BEYOND_FORWARD),
    Pass("alignment of merged experts", alignment, FORWARD, BEYOND_FORWARD),
    Pass("fit of merged experts", merge_fit, FORWARD, BEYOND_FUSED),
    Pass(
        "fit of merged experts without Triton",
        merge_fit,
        FORWARD,
        BEYOND_FORWARD,
        uses_triton=False,
    ),
    Pass("mask of experts", masked("experts"), FORWARD, BEYOND_FORWARD),
    Pass("mask of channels", masked("channels"), FORWARD, BEYOND_FORWARD),
    Pass("mask of merged experts", masked("merged experts"), FORWARD, BEYOND_FORWARD),
    Pass("mask with constants", masked("constants"), FORWARD, BEYOND_FORWARD),
    Pass("experts of unequal width", unequal_experts, FORWARD, BEYOND_FORWARD),
    Pass(BACKWARD, plain_backward, BACKWARD, 0),
    Pass("gradients", gradients(GradientHook), BACKWARD, BEYOND_BACKWARD, most_time=TIME),
    Pass("weight gradients", gradients(WeightGradientHook), BACKWARD, BEYOND_BACKWARD),
    Pass("fine-tuning of adapters", adapters, BACKWARD, BEYOND_BACKWARD),
]

if __name__ == "__main__":
    sys.exit(main())
