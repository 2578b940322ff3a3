"""The files that `duoserve` predicts by, fitted to some routing once."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.harness.inputs.kept_fits import Kept
from benchmarks.harness.inputs.split_routing import digest_of
from benchmarks.harness.reporting.progress import progress
from greenroom.core.artifacts.path_file import PathFile
from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.predictor.kinds.path import fit as path_fit
from greenroom.predictor.kinds.reuse import fit as reuse_fit
from greenroom.replay import RoutingTrace


@dataclass(frozen=True, slots=True)
class FitBoth:
    """How both files are fitted."""

    path: path_fit.FitOptions = field(default_factory=path_fit.FitOptions)
    reuse: reuse_fit.FitOptions = field(default_factory=reuse_fit.FitOptions)


QUICK_FIT = FitBoth(
    path=path_fit.FitOptions(rounds=1, steps=50, window=2),
    reuse=reuse_fit.FitOptions(rounds=1, steps=50, followers=False),
)


def fitted_files(name: str, trace: RoutingTrace, options: FitBoth, kept: Kept) -> tuple[ReuseFile, PathFile]:
    """Those that were made of this routing before, or made now. ``name``: of the routing, for the progress bar."""
    digest = digest_of(trace)
    with progress(2 * trace.layers, f"{name}: fitting", "layer") as bar:
        reuse = kept.get(
            ReuseFile, digest, options.reuse, (reuse_fit,),
            lambda: reuse_fit.fit(trace, options.reuse, on_layer=lambda _: bar.update()),
        )  # fmt: skip
        path = kept.get(
            PathFile, digest, (options.reuse, options.path), (reuse_fit, path_fit),
            lambda: path_fit.fit(trace, reuse, options.path, on_layer=lambda _: bar.update()),
        )  # fmt: skip
    return reuse, path
