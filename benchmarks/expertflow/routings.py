"""The routings that the stages measure on, and what is fitted to their first sequences."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.harness.inputs.bundled_routing import drawn_prompts, record_routing
from benchmarks.harness.inputs.fitted import FitBoth, fitted_files
from benchmarks.harness.inputs.kept_fits import Kept
from benchmarks.harness.inputs.split_routing import World, world_of
from benchmarks.harness.reporting.progress import progress
from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.core.artifacts.path_file import PathFile
from greenroom.core.artifacts.paths_file import PathsFile
from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.core.errors import InvalidConfig
from greenroom.predictor.kinds.paths import counts as paths_counts
from greenroom.predictor.kinds.paths import fit as paths_fit
from greenroom.predictor.kinds.paths import logistic as paths_logistic
from greenroom.predictor.kinds.paths import t5, t5_past, t5_samples, t5_start, t5_training
from greenroom.predictor.kinds.paths.prompt_texts import prompts_beside, prompts_of
from greenroom.predictor.kinds.paths.t5_training import T5Options
from greenroom.replay import RoutingTrace
from greenroom.replay.traces.token_numbers import numbered_by, tokens_of

BUNDLED: Final = "bundled"
MEASURED: Final = 1 / 3
"""The share of a routing's sequences that nothing is fitted to, the last ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """``prompts``: of the bundled model, whose routing is recorded now. ``trace``: a recorded routing with tokens, of
    which the first ``sequences`` are taken (None: all). ``seeds``: runs of what is random."""

    trace: Path | None = None
    prompts: int = 400
    sequences: int | None = None
    seeds: int = 3
    fit: FitBoth = field(default_factory=FitBoth)


@dataclass(frozen=True, slots=True, eq=False)
class Files:
    """Fitted to the sequences that are not measured. ``paths``: what foretells from tokens."""

    reuse: ReuseFile
    path: PathFile
    paths: PathsFile

    @property
    def each(self) -> tuple[ArtifactFile, ...]:
        return self.reuse, self.path, self.paths


def worlds(inputs: Inputs) -> Iterator[World]:
    """The bundled model's routing, and the recorded one where there is one. Raises InvalidConfig for one without
    tokens."""
    yield split(BUNDLED, _bundled(inputs.prompts))
    if inputs.trace is not None:
        trace = RoutingTrace.load(inputs.trace, tokens=True)
        if trace.token is None:
            allowed = "routing with the tokens of its rows: an array token, or decode_tokens in a .meta.jsonl beside it"
            raise InvalidConfig("trace", str(inputs.trace), allowed)
        prompts = prompts_beside(inputs.trace, trace.sequences)
        yield split(inputs.trace.stem, trace.part(0, inputs.sequences), prompts)


def split(name: str, trace: RoutingTrace, prompts: Sequence[str] | None = None) -> World:
    """Texts are numbered by the sequences that are fitted to: others are the unknown token. ``prompts``: of all
    sequences, and perhaps of more."""
    learnt = trace.sequences - max(1, math.ceil(trace.sequences * MEASURED))
    trace = numbered_by(trace, learnt)
    world = world_of(name, trace, MEASURED)
    if prompts is None or trace.token_texts is None:
        return world
    return replace(world, prompts=prompts_of(trace, learnt, prompts[: trace.sequences]))


@lru_cache(maxsize=2)
def _bundled(prompts: int) -> RoutingTrace:
    return record_routing(drawn_prompts(prompts))


def fitted_to(world: World, fit: FitBoth, trace: RoutingTrace | None = None) -> Files:
    """Those that were made of this routing before, or made now. ``trace``: fit to this in place of all of ``world``."""
    trace, kept = world.fitted if trace is None else trace, Kept.usual()
    reuse, path = fitted_files(world.name, trace, fit, kept)
    return Files(reuse, path, tables(world.name, trace, reuse, fit, kept))


def tables(name: str, trace: RoutingTrace, reuse: ReuseFile, fit: FitBoth, kept: Kept, shared_by: int = 1) -> PathsFile:
    """Of tokens that so many sequences have (``greenroom paths fit``)."""
    options = paths_fit.FitOptions(least_sequences=shared_by)
    with progress(trace.layers, f"{name}: fitting tables of tokens", "layer") as bar:
        return kept.get(
            PathsFile, _digest_with_tokens(trace), (fit.reuse, options), (paths_fit, paths_counts, paths_logistic),
            lambda: paths_fit.fit(trace, reuse, options, on_layer=lambda _: bar.update()),
        )  # fmt: skip


def network(world: World, files: Files, options: T5Options) -> PathsFile:
    """As ``greenroom paths fit --form t5`` trains it."""
    prompts = None if world.prompts is None else world.prompts[: world.fitted.sequences]
    with progress(100, f"{world.name}: training T5", "%") as bar:
        return Kept.usual().get(
            PathsFile, _digest_with_tokens(world.fitted), (options, prompts is None), _NETWORK,
            lambda: t5_training.fit_t5(
                world.fitted, prompts, options, reuse=files.reuse,
                on_progress=lambda share: bar.update(round(100 * share) - bar.n),
            ),
        )  # fmt: skip


_NETWORK: Final = (t5, t5_past, t5_samples, t5_start, t5_training)


def _digest_with_tokens(trace: RoutingTrace) -> str:
    found = hashlib.sha256(tokens_of(trace).tobytes() + trace.experts.tobytes() + trace.seq_starts.tobytes())
    return found.hexdigest()[:16]


# -- for processes that replay side by side --------------------------------------------------------------------------


@contextmanager
def in_folder(world: World, files: Files) -> Iterator[Path]:
    """A folder from which ``opened`` reads them, in whatever process."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        world.measured.save(folder / "trace.npz")
        for file in files.each:
            file.write(folder / f"{file.KIND}.safetensors")
        yield folder


@lru_cache(maxsize=1)
def opened(folder: Path) -> tuple[RoutingTrace, Files]:
    """What ``in_folder`` has written."""
    reuse, path, paths = (one.read(folder / f"{one.KIND}.safetensors") for one in (ReuseFile, PathFile, PathsFile))
    assert isinstance(reuse, ReuseFile)
    assert isinstance(path, PathFile)
    assert isinstance(paths, PathsFile)
    return RoutingTrace.load(folder / "trace.npz"), Files(reuse, path, paths)
