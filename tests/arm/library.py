"""The library for ARM in a process of its own, with the interface that ``ctypes`` gives one of this machine.

What a call's pointers lead to is copied into shared memory, and back after the call. How much that is follows from the
other arguments: ``_ARGUMENTS`` has it by function.
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from greenroom.experts.pack.layout import DTYPES
from greenroom.moe.formats.panels import panels_of, units_of
from tests.arm.build import DRIVER, EMULATOR, LIBRARY, SYSTEM

_MEMORY: Final = 1 << 28
_GAP: Final = 64
"""Bytes between any two things that a call may touch. They are NaN in bf16 and in fp32, and must stay as they are."""
_NAN: Final = b"\xff"

Pointer = int | None
Words = NDArray[np.int64]


class ArmLibrary:
    """As ``ctypes.CDLL``. The processor is qemu's: its variable ``QEMU_CPU`` names another one."""

    def __init__(self, folder: Path) -> None:
        """``folder``: that of ``build``."""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._file.truncate(_MEMORY)
        self.memory = mmap.mmap(self._file.fileno(), _MEMORY)
        self._process = subprocess.Popen(
            [EMULATOR, "-L", SYSTEM, folder / DRIVER, folder / LIBRARY, f"/dev/fd/{self._file.fileno()}", str(_MEMORY)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[self._file.fileno()],
        )  # fmt: skip
        self.base = int(self._answer())
        """Where the shared memory is in that process."""

    def __getattr__(self, name: str) -> Function:
        if not name.startswith("greenroom_"):
            raise AttributeError(name)
        function = Function(self, name)
        setattr(self, name, function)
        return function

    def ask(self, line: str) -> str:
        """The answer to a line of the driver's. Raises RuntimeError if the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # what it died of says _answer
        return self._answer()

    def close(self) -> None:
        self._process.communicate()
        self.memory.close()
        self._file.close()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{EMULATOR} ended with {self._process.wait()}")
        return line.removesuffix("\n")


class Function:
    """As ``ctypes`` has one."""

    def __init__(self, library: ArmLibrary, name: str) -> None:
        self._library, self._name = library, name
        self.argtypes: list[Any] = []
        self.restype: Any = ctypes.c_int

    def __call__(self, *given: Any) -> Any:
        if self._name == "greenroom_use_threads":
            return self._library.ask("threads")
        arguments = [one.value if isinstance(one, ctypes.c_int64) else one for one in given]
        if self.restype is ctypes.c_char_p:
            return self._library.ask(f"text {self._name} {arguments[0]}").encode() or None
        call = Call(self._library)
        if self._name in _ARGUMENTS:
            arguments = _ARGUMENTS[self._name](call, *arguments)
        floats = [repr(one) for one in arguments if isinstance(one, float)]
        integers = [str(int(one or 0)) for one in arguments if not isinstance(one, float)]
        line = " ".join(["call", self._name, str(len(integers)), *integers, str(len(floats)), *floats])
        result = int(self._library.ask(line))
        call.take_back()
        return None if self.restype is None else self.restype(result).value


class Call:
    """The memory that one call sees."""

    def __init__(self, library: ArmLibrary) -> None:
        self.library = library
        self._memory, self._base = library.memory, library.base
        self._buffers: dict[tuple[int, int], int] = {}
        self._kept: list[Words] = []  # their addresses are keys of the above
        self._end = 0
        self._gap()

    def of(self, address: Pointer, *lengths: int, size: int = 2) -> int:
        """Where the driver has what is at ``address``: the product of the ``lengths``, of ``size`` bytes each."""
        length = int(np.prod(lengths)) * size
        if not address or not length:
            return 0
        if (address, length) not in self._buffers:
            self._buffers[address, length] = self._end
            self._memory[self._end : self._end + length] = ctypes.string_at(address, length)
            self._end += length
            self._gap()
        return self._base + self._buffers[address, length]

    def copied(self, words: Words) -> int:
        """Where the driver has these words, which this process's own are not."""
        words = np.ascontiguousarray(words, dtype=np.int64)
        self._kept.append(words)
        return self.of(words.ctypes.data, words.size, size=8)

    def take_back(self) -> None:
        end = 0
        for (address, length), at in self._buffers.items():
            assert self._memory[end:at].strip(_NAN) == b"", "something was written beside what was given"
            end = at + length
            ctypes.memmove(address, self._memory[at:end], length)
        assert self._memory[end : self._end].strip(_NAN) == b"", "something was written beside what was given"

    def _gap(self) -> None:
        end = (self._end + _GAP + 63) // 64 * 64
        self._memory[self._end : end] = _NAN * (end - self._end)
        self._end = end


def words_at(address: int, count: int) -> Words:
    return np.frombuffer(ctypes.string_at(address, 8 * count), np.int64).copy()


def _linear(
    call: Call, weights: int, bias: Pointer, x: int, out: int, rows: int, inputs: int, outputs: int, threads: int
) -> list[Any]:
    return [
        *(call.of(weights, outputs, inputs), call.of(bias, outputs), call.of(x, rows, inputs)),
        *(call.of(out, rows, outputs), rows, inputs, outputs, threads),
    ]


def _experts(
    call: Call, weights: int, starts: int, count: int, hidden: int, inner: int, x: int, tokens: int, scales: int,
    out: int, add: bool, *rest: Any, mxfp4: bool = False,
) -> list[Any]:  # fmt: skip
    sizes = [2 * inner * hidden, hidden * inner]
    if len(rest) > 1:  # with alpha and limit: gpt-oss's, with biases
        sizes = [sizes[0], 2 * inner, sizes[1], hidden]
    if mxfp4:
        sizes = [
            part for size, bias in zip(sizes[::2], sizes[1::2], strict=True) for part in (size // 4, size // 64, bias)
        ]
    return _routed(call, sizes, weights, starts, count, hidden, inner, x, tokens, scales, out, add, *rest)


def _grouped_experts(
    call: Call, formats: int, weights: int, starts: int, count: int, hidden: int, inner: int, *rest: Any
) -> list[Any]:
    return [
        call.of(formats, 6, size=8),
        *_routed(call, _grouped_sizes(call, formats, hidden, inner), weights, starts, count, hidden, inner, *rest),
    ]


def _grouped_sizes(call: Call, formats: int, hidden: int, inner: int) -> list[int]:
    """Of an expert's tensors, in pairs of bytes."""
    up, up_group, up_ordered, down, down_group, down_ordered = words_at(formats, 6).tolist()
    return [
        *_coded_sizes(call, up, up_group, up_ordered, 2 * inner, hidden, joined=True),
        *_coded_sizes(call, down, down_group, down_ordered, hidden, inner, joined=False),
    ]


def _coded_sizes(
    call: Call, number: int, group: int, ordered: bool, outputs: int, inputs: int, *, joined: bool
) -> list[int]:
    """Of a matrix's tensors, in pairs of bytes."""
    from tests.unit.kernels.grouped_weights import SAMPLES  # which asks for the library: late, since that is replaced

    name = call.library.ask(f"text greenroom_grouped_format {number}")
    of = next(
        of for of, _ in SAMPLES.values() if len({one.name for one in of.products}) == 1 and of.products[0].name == name
    )
    parts = of.of_matrix(joined=joined).parts(
        panels_of(outputs, joined=joined), units_of(inputs), -(-inputs // group) if group else 1
    )
    sizes = [int(np.prod(shape)) * DTYPES[dtype].itemsize // 2 for _, shape, dtype in parts]
    return [*sizes, *([2 * inputs] if ordered else [])]


def _routed(
    call: Call, sizes: list[int], weights: int, starts: int, count: int, hidden: int, inner: int, x: int, tokens: int,
    scales: int, out: int, add: bool, *rest: Any, unit: int = 2,
) -> list[Any]:  # fmt: skip
    """``sizes``: of an expert's tensors, in units of so many bytes."""
    addresses = words_at(weights, len(sizes) * count)
    there = np.array([call.of(at, size, size=unit) for at, size in zip(addresses.tolist(), sizes * count, strict=True)])
    bounds = words_at(starts, count + 1)
    total = int(bounds[-1])
    named = int(words_at(tokens, total).max()) + 1
    return [
        *(call.copied(there), call.of(starts, count + 1, size=8), count, hidden, inner, call.of(x, named, hidden)),
        *(call.of(tokens, total, size=8), call.of(scales, total, size=4)),
        *(call.of(out, named if add else total, hidden), add, *rest),
    ]


def _lossless_experts(
    call: Call, kind: int, weights: int, starts: int, count: int, hidden: int, inner: int, *rest: Any
) -> list[Any]:
    sizes = _lossless_sizes(kind, hidden, inner)
    return [kind, *_routed(call, sizes, weights, starts, count, hidden, inner, *rest, unit=1)]


def _lossless_sizes(kind: int, hidden: int, inner: int) -> list[int]:
    """Of an expert's tensors, in bytes."""
    return [
        *_lossless_matrix(kind, 2 * inner, hidden, joined=True),
        *_lossless_matrix(kind, hidden, inner, joined=False),
    ]


def _lossless_matrix(kind: int, outputs: int, inputs: int, *, joined: bool) -> tuple[int, int]:
    """Of a matrix's codes and its exponents, in bytes."""
    from greenroom.moe.formats.lossless.codes import (
        LOSSLESS,  # which asks for the library: late, since that is replaced
    )
    from greenroom.moe.formats.lossless.planes import LOSSLESS_PLANES
    from greenroom.moe.formats.lossless.record import LINE

    kept = LOSSLESS_PLANES if kind else LOSSLESS
    codes = int(np.prod(kept.codes_shape(outputs, inputs, joined=joined)))
    return codes, LINE * kept.lines(outputs, inputs, joined=joined)


def _lossless_encode(
    call: Call, kind: int, joined: bool, numbers: int, outputs: int, inputs: int, room: int, codes: int, exponents: int
) -> list[Any]:
    sizes = _lossless_matrix(kind, outputs, inputs, joined=joined)
    there = [call.of(at, size, size=1) for at, size in zip((codes, exponents), sizes, strict=True)]
    return [kind, joined, call.of(numbers, outputs, inputs), outputs, inputs, room, *there]


def _lossless_numbers(
    call: Call, kind: int, joined: bool, codes: int, exponents: int, outputs: int, inputs: int, into: int, threads: int
) -> list[Any]:
    sizes = _lossless_matrix(kind, outputs, inputs, joined=joined)
    there = [call.of(at, size, size=1) for at, size in zip((codes, exponents), sizes, strict=True)]
    return [kind, joined, *there, outputs, inputs, call.of(into, outputs, inputs), threads]


def _all_lossless_experts(
    call: Call, kind: int, weights: int, count: int, picks: int, scales: int, rows: int, k: int, hidden: int,
    inner: int, *rest: int,
) -> list[Any]:  # fmt: skip
    sizes = _lossless_sizes(kind, hidden, inner)
    return [kind, *_all(call, sizes, weights, count, picks, scales, rows, k, hidden, inner, *rest)]


def _all_experts(
    call: Call,
    weights: int,
    count: int,
    picks: int,
    scales: int,
    rows: int,
    k: int,
    hidden: int,
    inner: int,
    *rest: int,
) -> list[Any]:
    sizes = [4 * inner * hidden, 2 * hidden * inner]
    return _all(call, sizes, weights, count, picks, scales, rows, k, hidden, inner, *rest)


def _all(
    call: Call, sizes: list[int], weights: int, count: int, picks: int, scales: int, rows: int, k: int, hidden: int,
    inner: int, x: int, stream: int, threads: int,
) -> list[Any]:  # fmt: skip
    """``sizes``: of an expert's tensors, in bytes."""
    addresses = words_at(weights, len(sizes) * count).tolist()
    there = [call.of(at, size, size=1) for at, size in zip(addresses, sizes * count, strict=True)]
    return [
        *(call.copied(np.array(there)), count, call.of(picks, rows, k, size=8), call.of(scales, rows, k, size=4)),
        *(rows, k, hidden, inner, call.of(x, rows, hidden), call.of(stream, rows, hidden), threads),
    ]


def _add_rows(call: Call, out: int, tokens: int, rows: int, count: int, width: int) -> list[Any]:
    named = int(words_at(tokens, count).max()) + 1
    return [call.of(out, named, width), call.of(tokens, count, size=8), call.of(rows, count, width), count, width]


def _route(
    call: Call, weight: int, x: int, rows: int, hidden: int, experts: int, k: int, normalise: bool, rounded: bool,
    *rest: int,
) -> list[Any]:  # fmt: skip
    *mask, picks, scales, threads = rest
    if mask:  # route_confined
        allowed, stride, rerouted = mask
        size = rows * stride if stride else experts
        mask = [call.of(allowed, size, size=1), stride, call.of(rerouted, rows, size=1)]
    return [
        *(call.of(weight, experts, hidden), call.of(x, rows, hidden), rows, hidden, experts, k, normalise, rounded),
        *(*mask, call.of(picks, rows, k, size=8), call.of(scales, rows, k, size=4), threads),
    ]


def _linear_floats(
    call: Call, weights: int, x: int, out: int, rows: int, inputs: int, outputs: int, threads: int
) -> list[Any]:
    tensors = (weights, outputs, inputs), (x, rows, inputs), (out, rows, outputs)
    return [*(call.of(*tensor, size=4) for tensor in tensors), rows, inputs, outputs, threads]


def _rms_norm(call: Call, x: int, weight: int, out: int, rows: int, width: int, epsilon: float) -> list[Any]:
    return [call.of(x, rows, width), call.of(weight, width), call.of(out, rows, width), rows, width, epsilon]


def _rotary(call: Call, x: int, cosines: int, sines: int, rows: int, heads: int, dim: int) -> list[Any]:
    turns = call.of(cosines, rows, dim), call.of(sines, rows, dim)
    return [call.of(x, rows, heads, dim), *turns, rows, heads, dim]


def _attention(
    call: Call, queries: int, new_keys: int, new_values: int, rows: int, count: int, out: int, key_heads: int,
    group: int, key_dim: int, value_dim: int, scale: float, sinks: int | None, threads: int,
) -> list[Any]:  # fmt: skip
    sequences = words_at(rows, count * 6).reshape(count, 6)
    last = int(sequences[:, 0].max())
    tensors = []
    heads_and_dims = (key_heads * group, key_dim), (key_heads, key_dim), (key_heads, value_dim)
    for tensor, (heads, dim) in zip((queries, new_keys, new_values), heads_and_dims, strict=True):
        address, row_stride, head_stride = words_at(tensor, 3).tolist()
        length = last * row_stride + (heads - 1) * head_stride + dim
        there = call.of(address, length) if address else 0  # null: the sequences' memory has them already
        tensors.append(call.copied(np.array([there, row_stride, head_stride])))
    for sequence in sequences:
        _, keys, values, capacity, _, _ = sequence.tolist()
        sequence[1:3] = call.of(keys, key_heads, capacity, key_dim), call.of(values, key_heads, capacity, value_dim)
    return [
        *(*tensors, call.copied(sequences), count, call.of(out, last + 1, key_heads * group, value_dim)),
        *(key_heads, group, key_dim, value_dim, scale),
        *(0 if sinks is None else call.of(sinks, key_heads * group), threads),
    ]


def _linear_weights(call: Call, of: Any, inputs: int) -> Any:
    there = type(of).from_buffer_copy(of)
    there.bias = call.of(of.bias, of.outputs)
    if not of.format:
        there.weights = call.of(of.weights, of.outputs, inputs)
        return there
    ordered = of.order is not None
    sizes = _coded_sizes(call, of.format - 1, of.group, ordered, of.outputs, inputs, joined=False)
    names = [name for name in ("weights", "scales", "minimums", "order") if getattr(of, name) is not None]
    for name, size in zip(names, sizes, strict=True):
        setattr(there, name, call.of(getattr(of, name), size))
    return there


def _linear_layer(call: Call, of: Any, x: int, out: int, rows: int, inputs: int, threads: int) -> list[Any]:
    there = np.frombuffer(bytes(_linear_weights(call, of, inputs)), np.int64)
    return [
        *(call.copied(there), call.of(x, rows, inputs), call.of(out, rows, of.outputs)),
        *(rows, inputs, threads),
    ]


def _layer(call: Call, of: Any, mixed_width: int = 0) -> int:
    """AttentionWeights: without ``mixed_width`` what lies before attention, else what lies behind it."""
    lengths = {
        "before": of.hidden, "after": of.hidden, "query_norm": of.query_norm_width, "key_norm": of.key_norm_width,
    }  # fmt: skip
    there = type(of).from_buffer_copy(of)
    for name, length in lengths.items():
        setattr(there, name, call.of(getattr(of, name), length))
    for name in ("query", "key", "value", "output"):
        setattr(there, name, _linear_weights(call, getattr(of, name), mixed_width if name == "output" else of.hidden))
    padded = bytes(there) + bytes(-ctypes.sizeof(there) % 8)
    return call.copied(np.frombuffer(padded, np.int64))


def _before_attention(
    call: Call, of: Any, hidden: int, rows: int, cosines: int, sines: int, query: int, key: int, value: int,
    threads: int,
) -> list[Any]:  # fmt: skip
    results = (query, of.query.outputs), (key, of.key.outputs), (value, of.value.outputs)
    return [
        *(_layer(call, of), call.of(hidden, rows, of.hidden), rows),
        *(call.of(cosines, rows, of.dim), call.of(sines, rows, of.dim)),
        *(call.of(address, rows, width) for address, width in results),
        threads,
    ]


def _after_attention(
    call: Call, of: Any, mixed: int, width: int, hidden: int, normed: int, rows: int, threads: int
) -> list[Any]:
    streams = call.of(hidden, rows, of.hidden), call.of(normed, rows, of.hidden)
    return [_layer(call, of, width), call.of(mixed, rows, width), width, *streams, rows, threads]


_ARGUMENTS: Final[dict[str, Callable[..., list[Any]]]] = {
    "greenroom_linear": _linear,
    "greenroom_linear_layer": _linear_layer,
    "greenroom_experts": _experts,
    "greenroom_clamped_experts": _experts,
    "greenroom_mxfp4_experts": partial(_experts, mxfp4=True),
    "greenroom_grouped_experts": _grouped_experts,
    "greenroom_lossless_experts": _lossless_experts,
    "greenroom_lossless_encode": _lossless_encode,
    "greenroom_lossless_numbers": _lossless_numbers,
    "greenroom_all_experts": _all_experts,
    "greenroom_all_lossless_experts": _all_lossless_experts,
    "greenroom_add_rows": _add_rows,
    "greenroom_route": _route,
    "greenroom_route_confined": _route,
    "greenroom_linear_floats": _linear_floats,
    "greenroom_rms_norm": _rms_norm,
    "greenroom_rotary": _rotary,
    "greenroom_attention": _attention,
    "greenroom_before_attention": _before_attention,
    "greenroom_after_attention": _after_attention,
}
"""From a call's own arguments to those of the driver's."""
