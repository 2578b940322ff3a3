"""The kind ``paths`` makes the form that the service is told to make."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.core.errors import UnknownName
from greenroom.predictor.kinds.config import BuildingConfig
from greenroom.predictor.kinds.make import make_file
from greenroom.predictor.kinds.paths.kind import PathsKind
from greenroom.predictor.making.job import Job, dump_job
from greenroom.predictor.making.kind import TracedSequence, kept_of
from greenroom.predictor.traces.counts import Shape
from tests.routed_by_tokens import EXPERTS, LAYERS, LENGTH, drawn, routed


def kind(form: str) -> PathsKind:
    return PathsKind(BuildingConfig(paths_form=form))


def job(form: str) -> Job:
    tokens, prompts = drawn(50)
    picks = routed(tokens, prompts).experts.reshape(len(tokens), LENGTH, LAYERS, 1)
    kept = [
        kept_of([kind(form)], TracedSequence(one, EXPERTS, "", ids, 2))
        for one, ids in zip(picks, tokens.astype(np.uint32), strict=True)
    ]
    samples = [sample for one in kept if (sample := one[kind(form).keeps]) is not None]
    return Job("paths", "m", Shape(LAYERS, EXPERTS), samples, kind(form).options())


def test_the_process_that_makes_it_is_told_the_form() -> None:
    found = kind("t5").codec.load(make_file(dump_job(job("t5"))))
    assert found.form == "t5"
    assert found.report["recall"]["alone"] > 0.4, "a third of it, and by chance 0.11"
    assert kind("tables").codec.load(make_file(dump_job(job("tables")))).form == "tables"


def test_only_the_network_needs_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kind("t5").lacking is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert kind("tables").lacking is None
    assert (kind("t5").lacking, kind("best").lacking) == ("torch", "torch")


def test_another_form_is_refused() -> None:
    with pytest.raises(UnknownName, match="tables"):
        kind("t6")
