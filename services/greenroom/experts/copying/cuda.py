"""CUDA as an accelerator: streams for copies and for predictions beside the forward's; events order them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from greenroom.core.errors import BudgetTooSmall, InvalidConfig
from greenroom.core.units import format_bytes
from greenroom.experts.copying.accelerator import Accelerator, Mark

_cuda: Any = torch.cuda  # parts of it are typed in some releases and not in others

DEVICES = ("auto", "cpu", "cuda")


def device_type(device: str) -> str:
    """``cpu`` or ``cuda``: what ``cpu``, ``cuda`` or ``auto`` (a GPU if there is one) is here.

    Raises InvalidConfig for another name, and for ``cuda`` if torch finds no GPU.
    """
    if device not in DEVICES:
        raise InvalidConfig("device", device, f"allowed: {', '.join(DEVICES)}")
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        raise InvalidConfig("device", device, f"{why}; use cpu or auto")
    return "cuda"


def accelerator_of(device: str) -> Accelerator | None:
    """The accelerator for a ``device_type``. None: the CPU computes. Raises InvalidConfig as that does."""
    if device_type(device) == "cpu":
        return None
    return CudaAccelerator(torch.device("cuda", torch.cuda.current_device()))


class CudaMark:
    """An event. Waiting for it blocks the thread without spinning, because there may be few cores."""

    __slots__ = ("event",)

    def __init__(self, stream: Any) -> None:
        self.event = _cuda.Event(blocking=True)
        self.event.record(stream)

    def reached(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class CudaAccelerator:
    """One GPU. The compute queue is the current stream of the thread that owns the model."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies = _cuda.Stream(device)
        self._predictions = _cuda.Stream(device)

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def lock_pages(self, region: memoryview) -> Callable[[], None]:
        """Raises BudgetTooSmall if the system does not allow so much."""
        address = torch.frombuffer(region, dtype=torch.uint8).data_ptr()
        runtime = _cuda.cudart()
        error = int(runtime.cudaHostRegister(address, len(region), 0))
        if error:
            raise BudgetTooSmall(
                f"{format_bytes(len(region))} of RAM can not be page-locked for the GPU (CUDA error {error}): "
                "give less to --host-memory"
            )
        return lambda: _cuda.check_error(int(runtime.cudaHostUnregister(address)))

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Mark | None) -> Mark:
        with _cuda.stream(self._copies):
            if after is not None:
                self._copies.wait_event(_event(after))
            target.copy_(source, non_blocking=True)
            return CudaMark(self._copies)

    def mark(self) -> Mark:
        return CudaMark(_cuda.current_stream(self.device))

    def wait_for(self, mark: Mark) -> None:
        _cuda.current_stream(self.device).wait_event(_event(mark))

    def beside(self, work: Callable[[], None]) -> Mark:
        with _cuda.stream(self._predictions):
            work()
            return CudaMark(self._predictions)


def _event(mark: Mark) -> Any:
    if not isinstance(mark, CudaMark):
        raise TypeError(f"a mark of another device: {mark!r}")
    return mark.event
