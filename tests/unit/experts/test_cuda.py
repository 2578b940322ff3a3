"""CUDA's own calls, against a stand-in where there is no GPU: which stream waits for what, and what is refused."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import greenroom
from greenroom.core.errors import BudgetTooSmall, InvalidConfig
from greenroom.experts.copying import cuda
from greenroom.experts.copying.cuda import CudaAccelerator, accelerator_of
from greenroom.experts.pack.direct_io import page_aligned


class StandIn:
    """What ``torch.cuda`` is asked for, as a log."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.entered: list[str] = []
        self.refuses = 0

    def Stream(self, device: torch.device) -> Any:
        return _Stream(self, "copies")

    def current_stream(self, device: torch.device) -> Any:
        return _Stream(self, "forward")

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.entered.append(stream.name)
        yield
        self.entered.pop()

    def Event(self, *, blocking: bool) -> Any:
        assert blocking, "a thread that waits does not spin"
        return _Event(self)

    def cudart(self) -> Any:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.log.append(f"lock {nbytes}")
        assert address % 4096 == 0
        return self.refuses

    def cudaHostUnregister(self, address: int) -> int:
        self.log.append("unlock")
        return 0

    def check_error(self, error: int) -> None:
        assert not error


class _Stream:
    def __init__(self, owner: StandIn, name: str) -> None:
        self.owner, self.name = owner, name

    def wait_event(self, event: Any) -> None:
        self.owner.log.append(f"{self.name} waits for {event.name}")


class _Event:
    def __init__(self, owner: StandIn) -> None:
        self.owner, self.name = owner, ""

    def record(self, stream: _Stream) -> None:
        self.name = f"{stream.name} {sum('recorded' in line for line in self.owner.log)}"
        self.owner.log.append(f"recorded {self.name}")

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.owner.log.append(f"a thread waits for {self.name}")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    owner = StandIn()
    monkeypatch.setattr(cuda, "_cuda", owner)
    return owner


def test_copies_wait_for_the_forward_and_the_forward_for_copies(stand_in: StandIn) -> None:
    accelerator = CudaAccelerator(torch.device("cpu"))
    target, source = torch.zeros(8, dtype=torch.uint8), torch.ones(8, dtype=torch.uint8)
    read = accelerator.mark()
    filled = accelerator.copy(target, source, after=read)
    accelerator.wait_for(filled)
    assert stand_in.log == [
        "recorded forward 0",
        "copies waits for forward 0",
        "recorded copies 1",
        "forward waits for copies 1",
    ]
    assert target.tolist() == [1] * 8
    assert filled.reached()
    filled.wait()
    assert stand_in.log[-1] == "a thread waits for copies 1"
    accelerator.copy(target, source, after=None)
    assert stand_in.log[-1] == "recorded copies 2"
    assert not stand_in.entered


def test_pages_are_locked_for_as_long_as_they_are_used(stand_in: StandIn) -> None:
    unlock = CudaAccelerator(torch.device("cpu")).lock_pages(page_aligned(8192))
    assert stand_in.log == ["lock 8192"]
    unlock()
    assert stand_in.log == ["lock 8192", "unlock"]


def test_pages_that_can_not_be_locked_name_the_setting(stand_in: StandIn) -> None:
    stand_in.refuses = 2
    with pytest.raises(BudgetTooSmall, match=r"8 KiB of RAM can not be page-locked.*--host-memory"):
        CudaAccelerator(torch.device("cpu")).lock_pages(page_aligned(8192))


def test_a_mark_of_another_device_is_refused(stand_in: StandIn) -> None:
    class Other:
        def reached(self) -> bool:
            return True

        def wait(self) -> None: ...

    with pytest.raises(TypeError, match="another device"):
        CudaAccelerator(torch.device("cpu")).wait_for(Other())


def test_devices_by_name() -> None:
    assert accelerator_of("cpu") is None
    assert (accelerator_of("auto") is None) == (not torch.cuda.is_available())
    with pytest.raises(InvalidConfig, match="allowed: auto, cpu, cuda"):
        accelerator_of("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="use cpu or auto"):
        accelerator_of("cuda")


def test_nothing_in_the_package_synchronises_a_whole_device() -> None:
    """One event at a time may be waited for, in one place."""
    calls = []
    root = Path(greenroom.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "synchronize":
                calls.append((path.relative_to(root).as_posix(), ast.unparse(node)))
    assert calls == [("experts/copying/cuda.py", "self.event.synchronize")]
