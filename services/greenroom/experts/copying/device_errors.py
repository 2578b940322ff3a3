"""Errors of a device: which mean that it is lost to this process, and which that its memory ran out.

torch raises ``AcceleratorError`` with the runtime's code if a runtime call fails (CUDA and HIP use the same codes). It
raises a plain RuntimeError if cuBLAS, cuDNN, the driver or Triton fails, and ``OutOfMemoryError`` from its own
allocator.
"""

from __future__ import annotations

import errno
from typing import Any

import torch

from greenroom.core.errors import ModelBroken
from greenroom.experts.copying.cuda import CudaMark

_cuda: Any = torch.cuda  # parts of it are typed in some releases and not in others

_OUT_OF_MEMORY = 2

# By CUDA's description, all later work of the process gets the same error, or the device or its context is gone.
_FATAL = {
    4: "driver shutting down",
    100: "no CUDA-capable device is detected",
    201: "invalid device context",
    214: "uncorrectable ECC error",
    220: "uncorrectable NVLink error",
    226: "Invalid access of peer GPU memory over nvlink or a hardware error",
    700: "an illegal memory access was encountered",
    702: "the launch timed out and was terminated",
    709: "context is destroyed",
    710: "device-side assert triggered",
    714: "hardware stack error",
    715: "an illegal instruction was encountered",
    716: "misaligned address",
    717: "operation not supported on global/shared address space",
    718: "invalid program counter",
    719: "unspecified launch failure",
    721: "tensor memory not completely freed",
    810: "the MPS client has been terminated by the server",
    911: "an async error has occured in external entity outside of CUDA",  # its spelling
}
_DEVICE_WORDS = ("CUDA", "HIP", "CUBLAS", "cuBLAS", "CUDNN", "cuDNN", "Triton Error")


def raise_if_fatal(error: BaseException) -> None:
    """Raises ModelBroken if ``error`` says that the device is lost to this process."""
    if isinstance(error, ModelBroken):
        raise error
    if is_fatal(error):
        line = str(error).partition("\n")[0]
        raise ModelBroken(f"the device computes nothing any more ({type(error).__name__}: {line})") from error


def is_fatal(error: BaseException) -> bool:
    """Whether the device is lost to this process.

    If an error of the device does not tell, the device is asked: a lost one gives its error again.
    """
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    text = str(error)
    if not (isinstance(error, torch.AcceleratorError) or _is_of_device(text)):
        return False
    return getattr(error, "error_code", None) in _FATAL or any(told in text for told in _FATAL.values()) or _is_lost()


def device_loss() -> RuntimeError:
    """What torch raises after an illegal access has ended the device's context. For fault injection."""
    error = torch.AcceleratorError(f"CUDA error: {_FATAL[700]}")
    error.error_code = 700  # type: ignore[attr-defined]  # set as torch does
    return error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or this machine was out of memory. Less may be available now, or as much later."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) == _OUT_OF_MEMORY or "out of memory" in str(error)
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    if "can't allocate memory" in text:  # torch's allocator on a CPU
        return True
    # cuBLAS and cuDNN have their own name for it. The driver (used by expandable segments) and Triton use CUDA's words.
    return "_STATUS_ALLOC_FAILED" in text or ("out of memory" in text and _is_of_device(text))


def _is_of_device(text: str) -> bool:
    return any(word in text for word in _DEVICE_WORDS)


def _is_lost() -> bool:
    if not _cuda.is_initialized():
        return False
    try:
        CudaMark(_cuda.current_stream()).wait()
    except RuntimeError as error:
        return not is_out_of_memory(error)
    return False
