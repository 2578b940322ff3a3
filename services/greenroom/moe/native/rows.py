"""The compiled products, called with tensors.

torch multiplies one bf16 row at half to three quarters of the speed at which the weights can be read, and more rows
at less where the processor has no instructions for bf16 (docs/decisions/0015). These kernels read the weights once for
several rows and sum in fp32, so that what is left to wait for is memory.
"""

from __future__ import annotations

import ctypes
import functools
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch

from greenroom.core.errors import GreenroomError


class NativeUnavailable(GreenroomError):
    """The compiled products are not to be had here; the message says why."""


class NativeRows:
    """The library, once in a process. All tensors are bf16 on the CPU, contiguous, with an even inner width.

    A row's result depends on nothing but that row and the weights: not on the rows beside it, nor on the threads.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        name = library.greenroom_instruction_set
        name.restype = ctypes.c_char_p
        found = name()
        if found is None:
            raise NativeUnavailable("this processor has neither AVX-512 nor AVX2")
        self.instruction_set: str = found.decode()
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._linear = library.greenroom_linear
        self._linear.argtypes = [pointer, pointer, pointer, count, count, count, ctypes.c_uint]
        self._linear.restype = None
        self._expert = library.greenroom_expert
        self._expert.argtypes = [
            *(pointer, pointer, count, count, pointer),
            *(pointer, pointer, count, pointer, ctypes.c_int, ctypes.c_uint),
        ]
        self._expert.restype = None
        self.threaded = _lend_threads(library)

    def linear(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``rows[R, inputs]`` through ``weight[outputs, inputs]``: ``[R, outputs]``, summed in fp32."""
        count, inputs = rows.shape
        outputs = len(weight)
        out = torch.empty(count, outputs, dtype=torch.bfloat16)
        threads = self._threads(outputs * inputs)
        self._linear(weight.data_ptr(), rows.data_ptr(), out.data_ptr(), count, inputs, outputs, threads)
        return out

    def expert(
        self,
        up: torch.Tensor,
        down: torch.Tensor,
        rows: torch.Tensor,
        tokens: int,
        scales: int,
        count: int,
        out: torch.Tensor,
        *,
        add: bool,
    ) -> None:
        """``down · (silu(gate · row) * (up · row)) * scale`` for ``count`` rows of ``rows[T, H]``.

        ``up[2 I, H]`` holds the gate first; ``down[H, I]``. ``tokens`` is the address of the rows' numbers (int64),
        ``scales`` that of their scales (fp32). Every intermediate result is rounded to bf16 as the tensors of
        transformers' eager experts are. Added to the same rows of ``out[T, H]``, or written to its first ``count``.
        """
        hidden, inner = down.shape
        self._expert(
            *(up.data_ptr(), down.data_ptr(), hidden, inner, rows.data_ptr()),
            *(tokens, scales, count, out.data_ptr(), add, self._threads(3 * hidden * inner)),
        )

    def _threads(self, weights: int) -> int:
        return torch.get_num_threads() if self.threaded and weights >= _WEIGHTS_WORTH_A_THREAD else 1


_WEIGHTS_WORTH_A_THREAD = 1 << 18
"""Weights from which a product takes longer than waking another thread for it: about 50 us of reading."""


@functools.cache
def native_rows() -> NativeRows:
    """The library of this installation. Raises NativeUnavailable, saying why."""
    here = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        path = here / f"_rows{suffix}"
        if path.exists():
            try:
                return NativeRows(ctypes.CDLL(str(path)))
            except OSError as error:
                raise NativeUnavailable(f"{path.name} can not be loaded: {error}") from error
    raise NativeUnavailable("greenroom was installed without a C++ compiler: install one and greenroom again")


def _lend_threads(library: ctypes.CDLL) -> bool:
    """Have the library run on the OpenMP threads that torch computes with; False: on the calling thread alone."""
    runtime = _openmp_runtime()
    if runtime is None:
        return False
    lend = library.greenroom_use_threads
    lend.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    lend.restype = None
    parallel, number = (ctypes.cast(f, ctypes.c_void_p) for f in (runtime.GOMP_parallel, runtime.omp_get_thread_num))
    lend(parallel, number)
    return True


def _openmp_runtime() -> Any:
    """The OpenMP runtime that torch has loaded, if it speaks GNU's interface (LLVM's and Intel's do as well)."""
    folder = Path(torch.__file__).parent / "lib"
    beside = folder.parent.parent / "torch.libs"
    names = [*folder.glob("libgomp*"), *beside.glob("libgomp*"), *folder.glob("libiomp5*"), *folder.glob("libomp*")]
    for path in names:
        try:
            runtime = ctypes.CDLL(str(path), mode=_ONLY_IF_LOADED)
            runtime.GOMP_parallel, runtime.omp_get_thread_num  # noqa: B018
        except (OSError, AttributeError):
            continue
        return runtime
    return None


_ONLY_IF_LOADED = ctypes.DEFAULT_MODE | os.RTLD_NOLOAD
