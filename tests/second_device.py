"""A second device for tests on a machine without a GPU.

Tensors on the device "gpu" compute on the CPU, with the CPU's numbers. Mixing them with tensors on
the CPU raises, as on CUDA: but for scalars, copies and indices. Operations are counted as kernels,
and those whose result the CPU needs as waits, by the line of moe_lab that asked for them.

    with SecondDevice() as device:
        model.to("gpu")
        ...
        assert not device.waits
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import moe_lab
from tools.unordered import ALWAYS

NAME = "gpu"
READS = frozenset(
    [
        "_local_scalar_dense",
        "_unique2",
        "bincount",
        "equal",
        "is_nonzero",
        "item",
        "masked_select",
        "nonzero",
        "unique2",
        "unique_consecutive",
    ]
)
"""Operations whose result, or its shape, the CPU needs."""
UNORDERED = ALWAYS | {"bincount"}
"""Operations that add floats in any order on CUDA."""
PACKAGE = Path(moe_lab.__file__).parent
COPIES = ("_to_copy", "copy_", "to", "cpu")
LAZY = {"_conj": torch.ops.aten.conj_physical.default, "_neg_view": torch.ops.aten.neg.default}
"""Operations that only mark a tensor, which a wrapper cannot carry -> those that compute."""
INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")


class _Backend:
    """The module torch.gpu: one device, whose random numbers are the CPU's."""

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
DEVICE = torch.device(NAME, 0)


class DeviceTensor(torch.Tensor):
    """A tensor on the device, whose numbers are in `numbers`, a tensor on the CPU."""

    numbers: torch.Tensor
    recorded: ClassVar[list[torch.Stream]] = []
    """Argument of each call of `record_stream`."""

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> DeviceTensor:
        tensor: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=DEVICE,
        )
        tensor.numbers = numbers
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def record_stream(self, stream: torch.Stream) -> None:
        self.recorded.append(stream)

    def tolist(self) -> list[Any]:
        values: list[Any] = self.cpu().tolist()
        return values

    def numpy(self, **_: Any) -> Any:
        raise TypeError("a tensor on the device is no array: copy it to the CPU first")


def _numbers(value: Any) -> Any:
    return value.numbers if isinstance(value, DeviceTensor) else value


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of an operation, on the device if its tensors or its argument `device` are."""
    name = func.overloadpacket.__name__
    if func.namespace == "prim" and name == "device":
        return DEVICE
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    on_device = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
    on_cpu = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor)]
    if on_device and name not in (*COPIES, *INDEXED) and any(tensor.dim() for tensor in on_cpu):
        raise RuntimeError(f"{name} at {caller()} has tensors on {DEVICE} and on the CPU")

    def on_the_cpu(value: Any) -> Any:
        is_device = isinstance(value, torch.device) and value.type == NAME
        return torch.device("cpu") if is_device else _numbers(value)

    func = LAZY.get(name, func)
    arguments, options = tree_map(on_the_cpu, (args, dict(kwargs)))
    options.pop("pin_memory", None)
    # takes integers on CUDA, but not on the CPU
    if name == "histc" and not arguments[0].is_floating_point():
        arguments = (arguments[0].float(), *arguments[1:])
    with torch.inference_mode(False), torch.no_grad():
        result = func(*arguments, **options)
    if not is_result_on_device(name, args, kwargs):
        return result
    same = {id(tensor.numbers): tensor for tensor in on_device}

    def on_the_device(leaf: Any) -> Any:
        is_plain = isinstance(leaf, torch.Tensor) and not isinstance(leaf, DeviceTensor)
        if not is_plain:
            return leaf
        return same[id(leaf)] if id(leaf) in same else DeviceTensor(leaf)

    with torch.inference_mode(False):  # a wrapper keeps its version counter
        wrapped = tree_map(on_the_device, result)
        return return_and_correct_aliasing(func, args, kwargs, wrapped) if on_device else wrapped


def is_result_on_device(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the result of an operation is on the device: where the target of a copy is, where
    the arguments say, or else where its tensors are."""
    if name == "copy_":
        return isinstance(args[0], DeviceTensor)
    devices = [torch.device("cpu")] if name == "cpu" else [*args, kwargs.get("device")]
    for device in devices:
        if isinstance(device, torch.device):
            return device.type == NAME
    return any(isinstance(leaf, DeviceTensor) for leaf in tree_leaves((args, kwargs)))


def is_wait(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the CPU waits for an operation: for a copy from the device, or to it unless it is
    non_blocking, for a value or a shape, and for an index by booleans or on the CPU."""
    if name in COPIES:
        source = args[1] if name == "copy_" else args[0]
        is_to_device = is_result_on_device(name, args, kwargs)
        if isinstance(source, DeviceTensor) == is_to_device:
            return False
        return not (is_to_device and kwargs.get("non_blocking"))
    if not any(isinstance(leaf, DeviceTensor) for leaf in tree_leaves((args, kwargs))):
        return False
    if name not in INDEXED:
        return name in READS
    indices = [leaf for leaf in tree_leaves(args[1:2]) if isinstance(leaf, torch.Tensor)]
    return any(
        index.dtype == torch.bool or not isinstance(index, DeviceTensor) for index in indices
    )


def caller() -> str:
    """Where moe_lab called the operation that runs, as file:line:function."""
    frame = sys._getframe(1)
    while frame := frame.f_back:  # type: ignore[assignment]
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(PACKAGE):
            return f"{file.relative_to(PACKAGE)}:{frame.f_lineno}:{frame.f_code.co_name}"
    return "elsewhere"


# Tensors that C++ makes are made below the dispatch of Python.


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> DeviceTensor:
    return DeviceTensor(torch.empty(size, dtype=dtype, device="cpu"))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> DeviceTensor:
    return DeviceTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _numbers(target).copy_(_numbers(source))
    return target


_LIBRARY = torch.library.Library("aten", "IMPL")
_LIBRARY.impl("empty.memory_format", _empty, "PrivateUse1")
_LIBRARY.impl("empty_strided", _empty_strided, "PrivateUse1")
_LIBRARY.impl("_copy_from", _copy, "PrivateUse1")


def _unpinned(like: torch.Tensor, pin_memory: bool = False, **named: Any) -> torch.Tensor:
    """torch.empty_like without pinned memory, which torch has only with a GPU."""
    return EMPTY_LIKE(like, **named)


EMPTY_LIKE = torch.empty_like


def _copied_afterwards(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`make`, a function such as torch.tensor, that makes tensors of the device on the CPU."""

    def made(data: Any, *args: Any, device: Any = None, **named: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != NAME:
            return make(data, *args, device=device, **named)
        return data if isinstance(data, DeviceTensor) else make(data, *args, **named).to(NAME)

    return made


class SecondDevice(TorchDispatchMode):
    """While it is open, there is a device "gpu"."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        """"operation at file:line:function" -> number of times that the CPU waited."""
        self.unordered: Counter[str] = Counter()
        """The same for operations that add floats in any order on CUDA."""

    def __enter__(self) -> SecondDevice:
        self._makers = [
            patch.object(torch, name, _copied_afterwards(getattr(torch, name)))
            for name in ("tensor", "as_tensor")
        ]
        self._makers.append(patch.object(torch, "empty_like", _unpinned))
        for maker in self._makers:
            maker.start()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for maker in self._makers:
            maker.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if is_wait(name, args, kwargs):
            self.waits[f"{name} at {caller()}"] += 1
        leaves = tree_leaves((args, kwargs))
        has_floats = any(
            isinstance(leaf, DeviceTensor) and leaf.is_floating_point() for leaf in leaves
        )
        if name in UNORDERED and has_floats:
            self.unordered[f"{name} at {caller()}"] += 1
        return _run(func, args, kwargs)


def on_device(model: Any) -> Any:
    """A copy of a model on the second device, whose experts are computed as on CUDA."""
    copied = copy.deepcopy(model).to(NAME)
    copied.set_experts_implementation("grouped_mm")
    return copied
