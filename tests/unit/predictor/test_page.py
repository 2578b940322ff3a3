"""docs/architecture/predictor.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from greenroom.predictor import PredictorConfig, PredictorMetrics
from greenroom.predictor.serving import Source
from greenroom.predictor.snapshot import dump_snapshot
from greenroom.predictor.tensors import load_tensors
from tests.unit.predictor.test_artifacts import snapshot

PAGE = (Path(__file__).parents[3] / "docs" / "architecture" / "predictor.md").read_text()


def test_every_metric_is_on_the_page() -> None:
    registry = CollectorRegistry()
    PredictorMetrics(registry)
    names = {family.name.removeprefix("greenroom_predictor_") for family in registry.collect()}
    assert len(names) == 15
    assert [name for name in names if not re.search(rf"`{name}(_total)?(\{{|`)", PAGE)] == []


def test_every_source_is_on_the_page() -> None:
    for source in Source:
        assert f"| `{source.value}` |" in PAGE


def test_the_file_has_what_the_page_says() -> None:
    arrays, metadata = load_tensors(dump_snapshot(snapshot(1)))
    for name in (*arrays, *metadata):
        assert f"`{name.replace('task.0', 'task.N')}`" in PAGE, name


def test_the_limits_on_the_page_are_the_defaults() -> None:
    config = PredictorConfig()
    assert f"among the last {config.seen_window:,} of its model" in PAGE
    assert f"reading stops at {config.max_unsaved:,}" in PAGE
