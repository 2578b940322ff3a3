"""llama.cpp's settings, and the choice among them: those that were fastest in trials on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

READ_AHEADS_KIB = (128, 512, 2048)
"""Tried beside the device's own where memory is short: llama.cpp reads what is missing by page faults."""

AS_STORED = "as stored"
"""The ``dtype`` of a GGUF file that is there."""

T = TypeVar("T")


@dataclass(frozen=True)
class LlamaSettings:
    """``dtype``: of the matrices (bfloat16 to float16 loses nothing but what is below 6e-8), or ``AS_STORED``.
    ``load_mode``: mmap, or none: read into memory of its own. ``flash_attention``: -1 lets llama.cpp decide.
    ``unified_kv``: one KV buffer for all sequences. ``repack``: codes are laid out anew for the processor, in memory of
    its own, however the file was loaded. ``read_ahead_kib``: of the block device while it runs, None: as it is.
    """

    dtype: str = "bf16"
    load_mode: str = "mmap"
    threads: int = 2
    flash_attention: int = -1
    unified_kv: bool = False
    repack: bool = True
    read_ahead_kib: int | None = None

    def job(self, max_model_len: int) -> dict[str, Any]:
        """As the arm takes them."""
        return {
            "load_mode": self.load_mode,
            "threads": self.threads,
            "flash_attention": self.flash_attention,
            "unified_kv": self.unified_kv,
            "repack": self.repack,
            "max_model_len": max_model_len,
        }

    def describe(self) -> str:
        flash = {-1: "auto", 0: "off", 1: "on"}[self.flash_attention]
        ahead = "" if self.read_ahead_kib is None else f", read-ahead {self.read_ahead_kib} KiB"
        kv = "unified KV" if self.unified_kv else "KV by sequence"
        codes = "" if self.dtype != AS_STORED or self.repack else ", not repacked"
        return (
            f"{self.dtype}{codes}, load {self.load_mode}, {self.threads} threads, flash attention {flash}, {kv}{ahead}"
        )


def first_trials(threads: int, dtypes: Sequence[str]) -> list[LlamaSettings]:
    """How the weights lie: their dtype, and mapped or in memory of its own."""
    start = LlamaSettings(threads=threads)
    return [replace(start, dtype=dtype, load_mode=mode) for dtype in dtypes for mode in ("mmap", "none")]


def second_trials(best: LlamaSettings, sequences: int) -> list[LlamaSettings]:
    """The best so far, and single changes that may better it. On a CPU llama.cpp's auto means flash attention on."""
    changes: list[dict[str, Any]] = [{}, {"flash_attention": 0}]
    if sequences > 1:
        changes.append({"unified_kv": True})
    if best.dtype == AS_STORED:
        changes.append({"repack": False})
    if best.threads > 1:
        changes.append({"threads": best.threads - 1})
    return [replace(best, **change) for change in changes]


def memory_trials(best: LlamaSettings, own_kib: int | None, settable: bool) -> list[LlamaSettings]:
    """For memory smaller than the model: mapped, at several read-aheads if they can be set. Nothing is repacked: a copy
    of all codes would not fit."""
    mapped = in_place(best)
    if own_kib is None or not settable:
        return [mapped]
    return [replace(mapped, read_ahead_kib=kib) for kib in sorted({*READ_AHEADS_KIB, own_kib})]


def in_place(best: LlamaSettings) -> LlamaSettings:
    """The file mapped, and no copy made of codes."""
    return replace(best, load_mode="mmap", repack=best.repack and best.dtype != AS_STORED)


def waiting_trials(best: LlamaSettings, cores: int) -> list[LlamaSettings]:
    """For memory smaller than the model: more threads than cores, because each waits for its own page faults."""
    return [replace(best, threads=threads) for threads in sorted({cores, 2 * cores, 4 * cores} - {best.threads})]


def best_of(trials: Mapping[T, Sequence[float]]) -> T | None:
    """The trial with the highest median, the first of equal ones. One without a figure failed. None if all did."""
    medians = {trial: statistics.median(rates) for trial, rates in trials.items() if rates}
    return max(medians, key=lambda trial: medians[trial]) if medians else None
