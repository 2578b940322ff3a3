"""The forms of what foretells routing paths from tokens: fitted by name, or both, and the better is taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from greenroom.core.artifacts.paths_file import PathsFile
from greenroom.core.artifacts.paths_forms.t5 import T5
from greenroom.core.artifacts.paths_forms.tables import TABLES
from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.policies.base.array_types import Ids
from greenroom.predictor.kinds.paths.fit import FitOptions, fit
from greenroom.replay.traces.routing_trace import RoutingTrace
from greenroom.replay.traces.token_numbers import tokens_of

if TYPE_CHECKING:
    from greenroom.predictor.kinds.paths.t5_training import T5Options

_SHARE_OF_TABLES: Final = 0.4
"""Of the time, where both are fitted."""


def fit_form(
    form: str,
    trace: RoutingTrace,
    reuse: ReuseFile,
    options: FitOptions | None = None,
    *,
    prompts: Sequence[Ids] | None = None,
    network: T5Options | None = None,
    on_share: Callable[[float], object] = lambda _: None,
) -> PathsFile:
    """``form``: one of ``PATHS_FORMS``. ``prompts`` and ``network``: see ``fit_t5``; ``held_out``, ``seed``,
    ``seconds`` and ``least_sequences`` are those of ``options``. ``on_share`` is told which share is done.

    The report of the better one says what the other foresees: ``other_recall``. Raises InvalidConfig, TraceError.
    """
    began, options = time.monotonic(), options or FitOptions()
    if form == TABLES:
        return fit(trace, reuse, options, on_layer=lambda done: on_share(done / trace.layers))
    if form == T5:
        return _network(trace, reuse, options, prompts, network, on_share)
    seconds = None if options.seconds is None else _SHARE_OF_TABLES * options.seconds
    tables = fit(
        trace, reuse, replace(options, seconds=seconds), on_layer=lambda done: on_share(done / trace.layers / 2)
    )
    if options.seconds is not None:
        options = replace(options, seconds=max(0.0, options.seconds - (time.monotonic() - began)))
    return better(tables, _network(trace, reuse, options, prompts, network, lambda share: on_share((1 + share) / 2)))


def _network(
    trace: RoutingTrace,
    reuse: ReuseFile,
    options: FitOptions,
    prompts: Sequence[Ids] | None,
    network: T5Options | None,
    on_share: Callable[[float], object],
) -> PathsFile:
    from greenroom.predictor.kinds.paths.t5_training import T5Options, fit_t5

    tokens_of(trace, options.vocabulary)
    asked = replace(
        network or T5Options(), held_out=options.held_out, seed=options.seed, seconds=options.seconds,
        least_sequences=options.least_sequences,
    )  # fmt: skip
    return fit_t5(trace, prompts, asked, reuse=reuse, on_progress=on_share)


def better(first: PathsFile, second: PathsFile) -> PathsFile:
    """The one that foresees more of the held-out picks, by all that it may be told; of equal ones the first."""
    found, other = (first, second) if _recall(first) >= _recall(second) else (second, first)
    return replace(found, report={**found.report, "other": other.form, "other_recall": other.report["recall"]})


def _recall(file: PathsFile) -> float:
    return max(map(float, file.report["recall"].values()))
