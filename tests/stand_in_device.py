"""A device without hardware: torch's tensors say that they are on it, and every call that would block is reported.

Tensors hold their numbers in RAM and compute there at once, so results are those of the CPU. What differs is what a GPU
would make of the program: mixing devices is refused, a copy between device and pageable memory waits for all that was
queued before, and so does every look at a value. A copy to page-locked RAM that is not waited for arrives late.

Its name in torch is ``maia``, a backend that torch knows and no build has kernels for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

from greenroom.experts.copying.accelerator import Mark
from greenroom.worker.usable_memory import Memory
from tests.unit.experts.fake_accelerator import FakeAccelerator, Point

DEVICE = torch.device("maia", 0)
_POISON = 0x7F
_aten: Any = torch.ops.aten

_LOOKS = {
    "_local_scalar_dense",
    "bincount",
    "equal",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
    "_unique2",
}
"""Operators whose result, or its shape, the host has to know. ``repeat_interleave`` where its counts are a tensor."""


@dataclass(slots=True)
class Watch:
    """What the device was asked for while watched. ``blocking``: calls that wait for it, as "operator at place"."""

    blocking: list[str] = field(default_factory=list)

    def at(self, part: str) -> list[str]:
        """Those of one source file, or part of its path."""
        return [call for call in self.blocking if part in call]


_watches: list[Watch] = []
_late: list[StandInAccelerator] = []  # accelerators whose queues hold copies to RAM
_locked: dict[int, torch.Tensor] = {}  # page-locked, by address, held for as long as the device is in use


def raw(tensor: Any) -> Any:
    """The numbers of a tensor of the device; anything else as it is."""
    return tensor.raw if isinstance(tensor, StandInTensor) else tensor


def page_locked(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """In the place of ``device_copies.page_locked``, which needs CUDA."""
    tensor = torch.empty(shape, dtype=dtype)
    _locked[tensor.data_ptr()] = tensor
    return tensor


def _is_locked(tensor: torch.Tensor) -> bool:
    address, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return any(start <= address and end <= start + memory.nbytes for start, memory in _locked.items())


def _where() -> str:
    """The innermost place in greenroom, or else in transformers, that led here."""
    frame, found = sys._getframe(1), ""
    while frame is not None:
        path = frame.f_code.co_filename
        if "/greenroom/" in path:
            return f"{path.rpartition('/greenroom/')[2]}:{frame.f_lineno}"
        if "/transformers/" in path and not found:
            found = f"transformers/{path.rpartition('/transformers/')[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return found or "a test"


def _blocks(what: str) -> None:
    for accelerator in _late:
        accelerator.run("compute")
    for watch in _watches:
        watch.blocking.append(f"{what} at {_where()}")


class StandInTensor(torch.Tensor):
    """``raw`` holds its numbers in RAM."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> StandInTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=DEVICE,
            requires_grad=False,
        )
        tensor.raw = numbers
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"StandInTensor({self.raw!r})"

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("a tensor of a device is no array of RAM")

    def requires_grad_(self, requires_grad: bool = True) -> StandInTensor:
        return self  # nothing is trained here, and autograd needs more of a device

    def _looked_at(self) -> torch.Tensor:
        _blocks("look at a value")
        return self.raw

    def item(self) -> Any:
        return self._looked_at().item()

    def tolist(self) -> Any:
        return self._looked_at().tolist()

    def __bool__(self) -> bool:
        return bool(self._looked_at())

    def __float__(self) -> float:
        return float(self._looked_at())

    def __int__(self) -> int:
        return int(self._looked_at())

    __index__ = __int__

    def contiguous(self, **_: Any) -> StandInTensor:  # type: ignore[override]
        return self if self.raw.is_contiguous() else StandInTensor(self.raw.contiguous())

    def __invert__(self) -> torch.Tensor:
        return torch.bitwise_not(self)

    def __getitem__(self, index: Any) -> Any:
        _look_at_indices(index)
        return StandInTensor(self.raw[tree_map(raw, index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        _look_at_indices(index)
        if isinstance(value, torch.Tensor) and not isinstance(value, StandInTensor):
            _blocks("copy of pageable memory to the device")
        self.raw[tree_map(raw, index)] = raw(value)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = function._schema.name.removeprefix("aten::")
        if name == "copy_":
            return _copy(args[0], args[1], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False)))
        flat = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
        target = _target_of(name, args, kwargs)
        if name in {"index", "index_put", "index_put_", "_index_put_impl_"}:
            _look_at_indices(args[1])
        elif any(not isinstance(value, StandInTensor) and value.ndim for value in flat):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, found cpu and {DEVICE}")
        if target is not None:
            _blocks(f"{name} from the device")
            kwargs.pop("non_blocking", None)
        elif name in _LOOKS and not (name == "repeat_interleave" and "Tensor" not in str(function)):
            _blocks(name)
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        args = tuple(torch.device("cpu") if isinstance(value, torch.device) else value for value in args)
        result = function(*tree_map(raw, args), **tree_map(raw, kwargs))
        if function._schema.is_mutable and args and isinstance(args[0], torch.Tensor) and name.endswith("_"):
            return args[0]
        if target is not None:
            return result.clone() if any(result is raw(value) for value in flat) else result
        if "out" in kwargs:
            return kwargs["out"]
        return tree_map(lambda value: StandInTensor(value) if isinstance(value, torch.Tensor) else value, result)


def _target_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """The device that a conversion ends on where that is not this one."""
    if name not in {"_to_copy", "to"}:
        return None
    named = [kwargs.get("device"), *(value for value in args if isinstance(value, torch.device))]
    other = args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else None
    if other is not None and not isinstance(other, StandInTensor):
        return other.device
    devices = [torch.device(value) for value in named if value is not None]
    return next((device for device in devices if device.type == "cpu"), None)


def _look_at_indices(index: Any) -> None:
    for value in tree_flatten(index)[0]:
        if not isinstance(value, torch.Tensor):
            continue
        if not isinstance(value, StandInTensor):
            _blocks("index from pageable memory")
        elif value.dtype in (torch.bool, torch.uint8):
            _blocks("index by a mask")


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    there, here = isinstance(target, StandInTensor), isinstance(source, StandInTensor)
    if there and here:
        target.raw.copy_(source.raw)  # type: ignore[attr-defined]
    elif there:
        if not (non_blocking and _is_locked(source)):
            _blocks("copy of pageable memory to the device")
        target.raw.copy_(source)  # type: ignore[attr-defined]
    elif non_blocking and _is_locked(target) and _late:
        numbers = raw(source).clone()
        target.view(torch.uint8).fill_(_POISON)
        _late[-1].later(torch.inference_mode()(lambda: target.copy_(numbers)))
    else:
        _blocks("copy from the device")
        target.copy_(raw(source))
    return target


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> StandInTensor:
    return StandInTensor(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> StandInTensor:
    return StandInTensor(torch.empty_strided(size, stride, dtype=dtype))


_library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
_library.impl("empty.memory_format", _empty, "MAIA")
_library.impl("empty_strided", _empty_strided, "MAIA")
_library.impl("_copy_from", lambda source, target, non_blocking=False: _copy(target, source, non_blocking), "MAIA")


class StandInAccelerator(FakeAccelerator):
    """The device to the engine: uploads come as late as they may, computation runs at once."""

    def __init__(self, *, lateness: int = 1) -> None:
        """``lateness``: how often a mark is asked about before it is reached."""
        super().__init__(eagerness=1.0, eager=("compute",))
        self.device = DEVICE
        self._lateness = lateness
        self._polls: dict[tuple[str, int], int] = {}
        self._computes_beside = False

    def allocate(self, nbytes: int) -> torch.Tensor:
        return StandInTensor(super().allocate(nbytes))

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Mark | None) -> Mark:
        return super().copy(raw(target), source, after)

    def beside(self, work: Callable[[], None]) -> Mark:
        def whole() -> None:
            self._computes_beside = True
            try:
                work()
            finally:
                self._computes_beside = False

        return super().beside(torch.inference_mode()(whole))

    def later(self, work: Any) -> None:
        if self._computes_beside:
            work()  # its mark stands behind the copy
            return
        with self._lock:
            self._queues["compute"].append(work)

    def polled(self, point: Point) -> None:
        asked = point.queue, point.position
        if point.queue == "copy" or self.done[point.queue] >= point.position:
            return
        self._polls[asked] = self._polls.get(asked, 0) + 1
        if self._polls[asked] > self._lateness:
            self.run(*asked)


@contextmanager
def watched() -> Iterator[Watch]:
    """Reports what blocks, in whatever thread."""
    watch = Watch()
    _watches.append(watch)
    try:
        yield watch
    finally:
        _watches.remove(watch)


@contextmanager
def stand_in(
    monkeypatch: pytest.MonkeyPatch, *, lateness: int = 1, memory: int = 8 << 30
) -> Iterator[StandInAccelerator]:
    """greenroom finds the device in the place of a GPU with ``memory`` bytes."""
    accelerator = StandInAccelerator(lateness=lateness)
    monkeypatch.setattr("greenroom.worker.model.model_runtime.accelerator_of", lambda _: accelerator)
    monkeypatch.setattr(
        "greenroom.worker.model.model_runtime.gpu_memory", lambda _: Memory(memory, memory, "the stand-in")
    )
    monkeypatch.setattr("greenroom.moe.kernels.device_copies.page_locked", page_locked)
    _late.append(accelerator)
    try:
        yield accelerator
    finally:
        _late.remove(accelerator)
        if not _late:
            _locked.clear()
