"""docs/architecture/predictor.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from greenroom.core.tensors import load_tensors
from greenroom.predictor import PredictorConfig, PredictorMetrics
from greenroom.predictor.kinds.emoe.artifact import dump_learned
from greenroom.predictor.kinds.emoe.priors import MAX_TASKS
from greenroom.predictor.kinds.registry import FORECAST_KINDS
from greenroom.predictor.kinds.statistics.served import Source
from greenroom.predictor.kinds.statistics.snapshot import dump_snapshot
from tests.unit.predictor.kinds.emoe.untrained import untrained
from tests.unit.predictor.kinds.statistics.libraries import snapshot

PAGE = (Path(__file__).parents[3] / "docs" / "architecture" / "predictor.md").read_text()


def test_every_metric_is_on_the_page() -> None:
    registry = CollectorRegistry()
    PredictorMetrics(registry)
    names = {family.name.removeprefix("greenroom_predictor_") for family in registry.collect()}
    assert len(names) == 29
    assert [name for name in names if not re.search(rf"`{name}(_total)?(\{{|`)", PAGE)] == []


def test_every_source_is_on_the_page() -> None:
    for source in (*Source, *(f"learned {kind}" for kind in FORECAST_KINDS)):
        assert f"| `{source}` |" in PAGE


def test_the_file_of_a_learned_predictor_has_what_the_page_says() -> None:
    arrays, metadata = load_tensors(dump_learned(untrained("emoe-a")))
    for name in (*arrays, *metadata):
        assert f"`{'weight.NAME' if name.startswith('weight.') else name}`" in PAGE, name


def test_the_defaults_of_builds_are_on_the_page() -> None:
    config = PredictorConfig().building
    for said in (
        f"below {config.drift.share} of what is usual",
        f"the median of the first {config.drift.settle}",
        f"when {config.drift.after} have been recorded",
        f"{config.drift.again:,} of any kind",
        f"at most {config.capacity} members",
        f"after {config.reuse_after} sequences and again after {config.reuse_again:,}",
        f"the last {config.max_sequences:,} sequences",
        f"after {config.retry_s:g} s",
    ):
        assert said in re.sub(r"\s+", " ", PAGE), said


def test_the_file_has_what_the_page_says() -> None:
    arrays, metadata = load_tensors(dump_snapshot(snapshot(1)))
    for name in (*arrays, *metadata):
        assert f"`{name.replace('task.0', 'task.N')}`" in PAGE, name


def test_the_limits_on_the_page_are_the_defaults() -> None:
    config = PredictorConfig()
    assert f"among the last {config.seen_window:,} of its model" in PAGE
    assert f"reading stops at {config.max_unsaved:,}" in PAGE
    assert f"{config.learning.max_waiting} forecasts wait" in PAGE
    assert f"the {MAX_TASKS} most frequent" in PAGE
    assert f"the last\n{config.learning.max_sequences:,} of them" in PAGE
