"""The configuration of a model in this process, as command line, environment and Python API give it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from greenroom.core.artifacts.artifact_kinds import ARTIFACT_FILES
from greenroom.core.errors import InvalidConfig
from greenroom.core.units import parse_bytes
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.base.fidelity import check_fidelity
from greenroom.policies.batching.batch_policy import BatchLimits, BatchPolicy
from greenroom.policies.registry import (
    artifact_kinds,
    check_foresees,
    check_given,
    check_taken,
    create_batch_policy,
    create_policy,
    spelt,
)
from greenroom.worker.usable_memory import usable_cores

DEVICES = ("auto", "cpu", "cuda")
EXPERTS_AS = ("auto", "stored", "expanded", "lossless", "lossless-codes", "lossless-planes")
DENSE_AS = ("auto", "stored", "expanded")
DTYPES = ("auto", "bfloat16", "float16", "float32")
ATTENTIONS = ("auto", "sdpa", "eager")
PRODUCTS = ("auto", "native", "torch")
DEFAULT_ROWS = 512


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One model and what it may use.

    - ``model``: a folder, a GGUF file (of several any one) or a hub id.
    - ``expert_memory``, ``host_memory``, ``kv_memory``: ``auto`` or a size such as ``2GiB``. The experts' two may also
      be a share of all experts, such as ``25%``. ``host_memory`` ``auto`` is none where the device tier is RAM.
    - ``device``: ``cpu``, ``cuda`` or ``auto`` (a GPU where there is one).
    - ``experts_as``: quantised experts stay as ``stored`` in the checkpoint, or are ``expanded`` to ``dtype`` while
      they are packed. ``auto``: as stored where compiled products take them so. ``lossless``: experts in bf16 take
      three quarters of their bytes or less; ``auto`` keeps them so where that is faster, ``expanded`` as they are.
      ``lossless-planes``, ``lossless-codes``: the one of the two that is meant, whatever is faster here.
    - ``dense_as``: the same of quantised linear layers outside the experts. ``stored`` is refused where there are no
      compiled products to take codes; ``auto`` expands there. Codes that they do not know become numbers either way.
    - ``products``: the compiled matrix products (``native``), those of ``torch``, or ``auto``.
    - ``compiled_rows``: up to how many rows the compiled products are used: ``measure``, ``auto`` (measured where the
      processor multiplies bf16 itself, else all), or fixed, ``8`` or ``PRODUCT,DECODE,PROMPT``.
    - ``batch_invariant``: the compiled products are used for any number of rows, so that a text never depends on what
      is generated beside it; the start fails where that can not be.
    - ``max_model_len``: tokens of prompt and answer together (None: the model's own).
    - ``tokens_per_step``: rows in one forward; ``auto``: by the memory plan, so that prompts run whole where the batch
      policy lets them. ``prefill_chunk``: how many of them one prompt may have, where the batch policy keeps to it.
    - ``rows_per_forward``: how many of them may be decode rows (None: all); where more decode, they run in several.
    - ``batching``: the batch policy, which says what rows form a step; its options as in ``NAME:OPTION=VALUE``.
    - ``threads``: cores to compute on (None: all that the process may use).
    - ``progress``: bars on stderr (None: on a terminal only).
    - ``policy``: the expert policy; its options as in ``NAME:OPTION=VALUE`` or as ``policy_options``.
    - ``fidelity``: what happens to a row whose expert is not resident. ``exact``: the expert is loaded. ``sensitive``:
      it is loaded where the row's task is sensitive in the layer, else the row goes to resident experts. ``paper``:
      every row goes to resident experts.
    - ``await_target``: with these two, a layer waits for those of its experts that the policy has just decided to keep.
    - ``profile``: a file made by `greenroom profile`. ``eamc``, ``expert_mlp``, ``path``, ``paths``, ``reuse``:
      artifacts of these kinds, for the policies that predict by them. ``residual``: a ResidualFile, for those that
      run routers ahead. ``found_beside``: which of these files nobody named; those of another model are passed over.

    Raises InvalidConfig, naming the field, and UnknownName for a policy that is not known.
    """

    model: str
    revision: str | None = None
    offline: bool = False
    served_model_name: str | None = None
    dtype: str = "auto"
    experts_as: str = "auto"
    dense_as: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    products: str = "auto"
    compiled_rows: str = "auto"
    batch_invariant: bool = False
    expert_memory: str = "auto"
    host_memory: str = "auto"
    kv_memory: str = "auto"
    policy: str = "duoserve"
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    fidelity: str = "exact"
    await_target: bool = True
    profile: Path | None = None
    eamc: Path | None = None
    expert_mlp: Path | None = None
    path: Path | None = None
    paths: Path | None = None
    reuse: Path | None = None
    residual: Path | None = None
    found_beside: frozenset[str] = frozenset()
    max_model_len: int | None = None
    max_running: int = 32
    max_waiting: int = 256
    tokens_per_step: int | str = DEFAULT_ROWS
    prefill_chunk: int | None = 256
    rows_per_forward: int | None = None
    batching: str = "fcfs"
    threads: int | None = None
    warm_start: bool = True
    cache_dir: Path | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("experts_as", self.experts_as, EXPERTS_AS)
        _one_of("dense_as", self.dense_as, DENSE_AS)
        _one_of("device", self.device, DEVICES)
        _one_of("attention", self.attention, ATTENTIONS)
        _one_of("products", self.products, PRODUCTS)
        _rows(self.compiled_rows)
        if self.batch_invariant and self.compiled_rows != "auto":
            raise InvalidConfig("compiled_rows", self.compiled_rows, "leave it out with batch_invariant: any number")
        check_fidelity(self.fidelity, profiled=self.profile is not None)
        if self.batch_invariant and self.fidelity != "exact":
            raise InvalidConfig(
                "fidelity",
                self.fidelity,
                "with batch_invariant exact only: else a row's experts depend on what is resident",
            )
        _at_least_one("max_model_len", self.max_model_len)
        _at_least_one("max_waiting", self.max_waiting)
        _at_least_one("threads", self.threads)
        if self.threads is not None and self.threads > _MOST_THREADS_A_CORE * usable_cores():
            most = _MOST_THREADS_A_CORE * usable_cores()
            raise InvalidConfig("threads", self.threads, f"at most {most}: this process may use {usable_cores()} cores")
        if self.served_model_name == "":
            raise InvalidConfig("served_model_name", "", "give a name, or leave it out for the model's own")
        for name, whole in (("expert_memory", 100), ("host_memory", 100), ("kv_memory", None)):
            _size(name, getattr(self, name), whole)
        if isinstance(self.tokens_per_step, str) and self.tokens_per_step != "auto":
            raise InvalidConfig("tokens_per_step", self.tokens_per_step, "a number of rows, or auto")
        name, options = chosen_policy(self.policy, self.policy_options)
        object.__setattr__(self, "policy", name)
        object.__setattr__(self, "policy_options", options)
        _policy(name, options)
        for kind, file in self.artifact_files.items():
            if kind not in self.artifact_kinds:
                check_taken(kind, str(file), [(name, options)])
        check_given(self.artifact_files.keys(), name, options)
        if self.residual is not None:
            check_foresees(str(self.residual), name, options)
        _ = self.limits(0)
        self.make_batch_policy()

    @property
    def artifact_kinds(self) -> frozenset[str]:
        """What the expert policy and the batch policy predict by. Raises UnknownName, InvalidConfig."""
        return artifact_kinds(self.policy, self.policy_options, self.batching)

    @property
    def artifact_files(self) -> Mapping[str, Path]:
        """The artifacts that the policy predicts by at first, by kind. A kind without a field here has no such file: it
        comes from the predictor service."""
        return {kind: file for kind in ARTIFACT_FILES if (file := getattr(self, kind, None)) is not None}

    def limits(self, kv_total: int) -> BatchLimits:
        """The batch policy's limits, with the KV budget in the loop's own unit. Raises InvalidConfig."""
        return BatchLimits(
            tokens_per_step=self.step_rows,
            max_running=self.max_running,
            kv_total=kv_total,
            prefill_chunk=self.prefill_chunk,
            rows_per_forward=self.rows_per_forward,
            plans_rounds=self.make_batch_policy().plans_rounds,
        )

    @property
    def step_rows(self) -> int:
        """Rows in one forward. Of ``auto`` the fewest that it may become."""
        rows = self.tokens_per_step
        return max(DEFAULT_ROWS, self.max_running) if isinstance(rows, str) else rows

    @property
    def wants_whole_prompts(self) -> bool:
        """Whether ``tokens_per_step`` is to be chosen, and more rows than the fewest let longer prompts run whole."""
        chunked = self.prefill_chunk is not None and self.make_batch_policy().applies_prefill_chunk
        return isinstance(self.tokens_per_step, str) and not chunked

    @property
    def prompt_rows(self) -> int:
        """The most rows of one prompt in a step."""
        chunk = self.prefill_chunk if self.make_batch_policy().applies_prefill_chunk else None
        return min(self.step_rows, chunk or self.step_rows)

    def make_batch_policy(self) -> BatchPolicy:
        """A new one. Raises UnknownName, InvalidConfig."""
        name, options = spelt("batching", self.batching)
        return create_batch_policy(name, options=options)


def takes(policy: type[ExpertPolicy], option: str) -> bool:
    """Whether an expert policy has this option. ``profile`` and ``fidelity`` are given to the policies that do."""
    return option in inspect.signature(policy).parameters


def chosen_policy(policy: str, options: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """An expert policy's name and options out of ``NAME:OPTION=VALUE`` and options beside it. Raises InvalidConfig."""
    name, spelt_out = spelt("policy", policy)
    for option in spelt_out.keys() & options.keys():
        raise InvalidConfig("policy", policy, f"{option} once: it is among the policy's options too")
    return (name, {**options, **spelt_out}) if spelt_out else (name, options)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidConfig(name, value, f"allowed: {', '.join(allowed)}")


_MOST_THREADS_A_CORE = 4
"""So that a typing mistake does not start thousands."""


def _at_least_one(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise InvalidConfig(name, value, "at least 1")


def _rows(text: str) -> None:
    parts = text.split(",")
    if text not in ("auto", "measure") and not (
        len(parts) in (1, 3) and all(part.strip().isdecimal() for part in parts)
    ):
        raise InvalidConfig(
            "compiled_rows",
            text,
            "auto, measure, a number of rows, or three: PRODUCT,DECODE,PROMPT",
        )


def _size(name: str, value: str, whole: int | None) -> None:
    if value != "auto":
        parse_bytes(value, field=name, whole=whole)


def _policy(name: str, options: Mapping[str, Any]) -> None:
    """Checks text and numbers. Other options, such as an oracle's future, depend on the model and are checked later."""
    plain = {option: value for option, value in options.items() if isinstance(value, str | int | float)}
    create_policy(name, catalogue=Catalogue.uniform("", layers=1, experts=1, top_k=1), options=plain)
