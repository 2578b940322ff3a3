"""The kind ``paths`` makes the form that the service is told to make."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.predictor.kinds.config import BuildingConfig
from greenroom.predictor.kinds.make import make_file
from greenroom.predictor.kinds.paths.kind import PathsKind
from greenroom.predictor.making.job import Job, dump_job
from greenroom.predictor.making.kind import TracedSequence, kept_of
from greenroom.predictor.traces.counts import Shape
from tests.routed_by_tokens import EXPERTS, LAYERS, LENGTH, TOKENS, drawn, routed


def kind(form: str) -> PathsKind:
    return PathsKind(BuildingConfig(paths_form=form))


def job(form: str, *, secret: bool = False) -> Job:
    """With ``secret`` one sequence begins with 1000, 1001, 1002."""
    tokens, prompts = drawn(50)
    picks = routed(tokens, prompts).experts.reshape(len(tokens), LENGTH, LAYERS, 1)
    if secret:
        tokens[20, :3] = 1000 + np.arange(3)
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


@pytest.mark.parametrize("form", ["tables", "t5"])
def test_what_one_sequence_alone_has_is_not_in_the_artifact(form: str) -> None:
    made = kind(form).codec.load(make_file(dump_job(job(form, secret=True))))
    assert made.tensors["tokens"].tolist() == list(range(TOKENS))
    assert (made.vocabulary, made.report["least_sequences"]) == (TOKENS, 5)


def test_how_many_sequences_share_what_is_told_can_be_set() -> None:
    told = job("tables", secret=True)
    told = replace(told, options=PathsKind(BuildingConfig(paths_shared_by=1)).options())
    made = kind("tables").codec.load(make_file(dump_job(told)))
    assert made.tensors["tokens"].tolist() == [*range(TOKENS), 1000, 1001, 1002]
    with pytest.raises(InvalidConfig, match="paths_shared_by"):
        BuildingConfig(paths_shared_by=0)


def test_only_the_network_needs_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kind("t5").lacking is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert kind("tables").lacking is None
    assert (kind("t5").lacking, kind("best").lacking) == ("torch", "torch")


def test_another_form_is_refused() -> None:
    with pytest.raises(UnknownName, match="tables"):
        kind("t6")
