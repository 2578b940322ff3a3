"""The compiled products, called with tensors.

torch multiplies one bf16 row at half to three quarters of the speed at which the weights can be read, and more rows
at less where the processor has no instructions for bf16 (docs/decisions/0015). These kernels read the weights once for
several rows and sum in fp32, so that what is left to wait for is memory.
"""

from __future__ import annotations

import ctypes
import functools
import os
from array import array
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

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
        self.most_rows = _ROWS_UNDER_BF16_INSTRUCTIONS if library.greenroom_multiplies_bf16() else _ANY_ROWS
        """How many rows of one product these kernels are faster for than torch's."""
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._linear = library.greenroom_linear
        self._linear.argtypes = [pointer, pointer, pointer, pointer, count, count, count, ctypes.c_uint]
        self._linear.restype = None
        self._expert = library.greenroom_expert
        self._expert.argtypes = [
            *(pointer, pointer, count, count, pointer),
            *(pointer, pointer, count, pointer, ctypes.c_int, ctypes.c_uint),
        ]
        self._expert.restype = None
        self._rms_norm = library.greenroom_rms_norm
        self._rms_norm.argtypes = [pointer, pointer, pointer, count, count, ctypes.c_float]
        self._rms_norm.restype = None
        self._rotary = library.greenroom_rotary
        self._rotary.argtypes = [pointer, pointer, pointer, count, count, count]
        self._rotary.restype = None
        self._attention = library.greenroom_attention
        self._attention.argtypes = [
            *(pointer, pointer, pointer, pointer, count, pointer),
            *(count, count, count, count, ctypes.c_float, ctypes.c_uint),
        ]
        self._attention.restype = None
        self.attention_granularity: int = library.greenroom_attention_granularity()
        """What the width of a head must be a multiple of."""
        self.threaded = _lend_threads(library)

    def linear(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``rows[R, inputs]`` through ``weight[outputs, inputs]``, plus ``bias[outputs]``: ``[R, outputs]``.

        Summed in fp32, rounded once.
        """
        count, inputs = rows.shape
        outputs = weight.shape[0]
        out = torch.empty(count, outputs, dtype=torch.bfloat16)
        threads = self._threads(outputs * inputs)
        self._linear(
            *(weight.data_ptr(), None if bias is None else bias.data_ptr(), rows.data_ptr(), out.data_ptr()),
            *(count, inputs, outputs, threads),
        )
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

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """``weight * (rows / sqrt(mean(rows²) + epsilon))`` over the last axis, the bracket rounded to bf16 first."""
        out = torch.empty_like(rows)
        width = rows.shape[-1]
        self._rms_norm(rows.data_ptr(), weight.data_ptr(), out.data_ptr(), rows.numel() // width, width, epsilon)
        return out

    def rotate(self, rows: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
        """Rotary position embedding of ``rows[T, heads, D]`` in place, by ``cosines[T, D]`` and ``sines[T, D]``."""
        count, heads, dim = rows.shape
        self._rotary(rows.data_ptr(), cosines.data_ptr(), sines.data_ptr(), count, heads, dim)

    def attention(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sequences: NDArray[np.int64],
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """Attention of single rows, each over a sequence of its own, whose memory gets the row's key and value first.

        ``queries[1, heads, T, D]``, ``keys[1, key heads, T, D]`` and ``values`` of a step, last axis contiguous;
        ``out[1, T, heads, value D]``, of which the rows named are written. ``sequences[n, 6]``: the row of the step,
        the addresses of the sequence's keys and values ``[key heads, capacity, D]``, the capacity, how many are
        written, and the first one to look at.
        """
        _, key_heads, _, key_dim = keys.shape
        strides = [array("q", (t.data_ptr(), t.stride(2), t.stride(1))) for t in (queries, keys, values)]
        self._attention(
            *(of.buffer_info()[0] for of in strides),
            *(sequences.ctypes.data, len(sequences), out.data_ptr()),
            *(key_heads, queries.shape[1] // key_heads, key_dim, values.shape[3], scale),
            self._threads(int(sequences[:, 4].sum()) * key_heads * key_dim * 2),
        )

    def _threads(self, weights: int) -> int:
        return torch.get_num_threads() if self.threaded and weights >= _WEIGHTS_WORTH_A_THREAD else 1


_ANY_ROWS = 1 << 30
"""Without instructions for bf16 torch was slower at every number of rows, up to 256, that was measured."""

_ROWS_UNDER_BF16_INSTRUCTIONS = 4
"""With them a product is bound by memory up to a handful of rows, and theirs to compute beyond."""

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
