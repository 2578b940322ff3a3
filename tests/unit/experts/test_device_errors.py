"""Which errors of a device end the model, and which only what ran."""

from __future__ import annotations

import errno

import pytest
import torch

from greenroom.core.errors import ModelBroken, TransferFailed
from greenroom.experts.copying import device_errors
from greenroom.experts.copying.device_errors import device_loss, is_fatal, is_out_of_memory, raise_if_fatal


def of_runtime(code: int, text: str) -> torch.AcceleratorError:
    """As torch raises it where a runtime call fails: the code beside CUDA's text and some advice."""
    error = torch.AcceleratorError(f"CUDA error: {text}\nCompile with `TORCH_USE_CUDA_DSA` to enable ...\n")
    error.error_code = code  # type: ignore[attr-defined]
    return error


FATAL = {
    "illegal access": of_runtime(700, "an illegal memory access was encountered"),
    "assert": of_runtime(710, "device-side assert triggered"),
    "launch failure": of_runtime(719, "unspecified launch failure"),
    "ECC": of_runtime(214, "uncorrectable ECC error encountered"),
    "context": of_runtime(709, "context is destroyed"),
    "off the bus": of_runtime(100, "no CUDA-capable device is detected"),
    "without a code": torch.AcceleratorError("HIP error: unspecified launch failure"),
    "driver": RuntimeError("CUDA driver error: an illegal memory access was encountered"),
    "Triton": RuntimeError("Triton Error [CUDA]: device-side assert triggered"),
}
MEMORY = {
    "allocator": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "runtime": of_runtime(2, "out of memory"),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cuDNN": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "driver": RuntimeError("CUDA driver error: out of memory"),
    "Triton": RuntimeError("Triton Error [CUDA]: out of memory"),
    "CPU": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: ..."
    ),
    "python": MemoryError(),
    "mmap": OSError(errno.ENOMEM, "Cannot allocate memory"),
}
ORDINARY = {
    "arguments": of_runtime(1, "invalid argument"),
    "launch": of_runtime(9, "invalid configuration argument"),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm(...)`"),
    "words alone": RuntimeError("the prompt says: out of memory"),
    "shapes": RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    "request's text": ValueError("CUDA error: an illegal memory access was encountered"),
    "disk": OSError(errno.EIO, "Input/output error"),
    "expert": TransferFailed("expert 3 of MoE layer 1 could not be had"),
}


@pytest.mark.parametrize("error", FATAL.values(), ids=FATAL)
def test_a_device_that_computes_no_more_breaks_the_model(error: Exception) -> None:
    assert is_fatal(error)
    assert not is_out_of_memory(error)
    with pytest.raises(ModelBroken, match=r"the device computes nothing any more \(\w+: .*\)$") as caught:
        raise_if_fatal(error)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", MEMORY.values(), ids=MEMORY)
def test_memory_that_runs_out_does_not(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert not is_fatal(error)
    raise_if_fatal(error)


@pytest.mark.parametrize("error", ORDINARY.values(), ids=ORDINARY)
def test_nor_does_a_call_that_was_refused(error: Exception) -> None:
    assert not is_fatal(error)
    assert not is_out_of_memory(error)
    raise_if_fatal(error)


def test_what_is_broken_stays_so() -> None:
    broken = ModelBroken("a mover has died")
    with pytest.raises(ModelBroken) as caught:
        raise_if_fatal(broken)
    assert caught.value is broken
    assert is_fatal(device_loss())


@pytest.mark.parametrize(
    ("answer", "lost"),
    [(None, False), (of_runtime(719, "unspecified launch failure"), True), (of_runtime(2, "out of memory"), False)],
)
def test_where_an_error_does_not_tell_the_device_is_asked(
    monkeypatch: pytest.MonkeyPatch, answer: Exception | None, lost: bool
) -> None:
    class Mark:
        def __init__(self, stream: object) -> None:
            pass

        def wait(self) -> None:
            if answer is not None:
                raise answer

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "stream")
    monkeypatch.setattr(device_errors, "CudaMark", Mark)
    assert is_fatal(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`")) is lost
    assert is_fatal(of_runtime(999, "unknown error")) is lost
    assert not is_fatal(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
