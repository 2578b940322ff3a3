from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from greenroom.core.artifacts.path_file import PathFile
from greenroom.core.artifacts.paths_file import PathsFile
from greenroom.core.artifacts.paths_forms.tables import feature_names
from greenroom.core.errors import InvalidConfig
from greenroom.core.tensors import Damaged
from tests.paths_files import tables

WIDTHS = (3, 2)


def made(**others: Any) -> PathsFile:
    return tables(
        WIDTHS,
        tokens=[4, 9],
        token={(0,): [1, 2, 3, 4, 5], (1,): [0, -1, 0, 0, 7]},
        pair={(1, 0): [9, 9, 9, 9, 9]},
        **others,
    )


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    file = replace(made(), model="m", report={"recall": {"tokens": 0.5}}, version=3)
    file.write(tmp_path / "paths.safetensors")
    read = PathsFile.read(tmp_path / "paths.safetensors")
    assert (read.form, read.vocabulary, read.version, read.model) == ("tables", 16, 3, "m")
    assert read.report == file.report
    for name, array in file.arrays.items():
        assert read.arrays[name].dtype == array.dtype
        assert read.arrays[name].tolist() == array.tolist()


def test_what_policies_are_handed_makes_the_file_again() -> None:
    file = made()
    again = PathsFile.of_arrays(file.arrays, WIDTHS, version=5)
    assert (again.form, again.vocabulary, again.version) == ("tables", 16, 5)
    assert again.tensors.keys() == file.tensors.keys()
    with pytest.raises(InvalidConfig, match="form and vocabulary"):
        PathsFile.of_arrays(file.tensors, WIDTHS)


def test_it_is_not_taken_for_the_kind_of_nearly_the_same_name(tmp_path: Path) -> None:
    made().write(tmp_path / "p.safetensors")
    with pytest.raises(InvalidConfig, match="greenroom path fit"):
        PathFile.read(tmp_path / "p.safetensors")


def test_a_file_of_another_model_or_vocabulary_is_refused_by_name() -> None:
    file = made()
    file.check_model(WIDTHS, 16)
    file.check_model(WIDTHS, 1000)
    file.check_model(WIDTHS)
    with pytest.raises(InvalidConfig, match=r"2 layers × 2 or 3 experts.*one of this model, 1 layers with 4 experts"):
        file.check_model((4,))
    with pytest.raises(InvalidConfig, match=r"a vocabulary of 16.*below 15"):
        file.check_model(WIDTHS, 15)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("popularity", np.zeros(4, np.float32)),
        ("bias", np.full((3, 5), np.nan, np.float32)),
        ("weights", np.zeros((3, 2, 2), np.float32)),
        ("keep", np.array([1.0], np.float32)),
        ("tokens", np.array([9, 4], np.uint32)),
        ("tokens", np.array([4, 16], np.uint32)),
        ("token.logits", np.zeros((2, 5), np.float32)),
        ("token.keys", np.array([[1], [0]], np.uint32)),
        ("pair.keys", np.array([[0, 2]], np.uint32)),
        ("pair.unit", np.array([np.inf], np.float32)),
    ],
)
def test_an_array_that_is_wrong_is_named(name: str, array: np.ndarray) -> None:
    file = made()
    with pytest.raises(InvalidConfig, match=name.replace(".", r"\.")):
        replace(file, tensors={**file.tensors, name: array})


@pytest.mark.parametrize(("rates", "allowed"), [(0, False), (1, True), (8, True), (9, False), (1000, False)])
def test_only_a_few_averages_over_earlier_tokens_are_kept(rates: int, allowed: bool) -> None:
    file = made()
    weights = np.zeros((3, len(feature_names(rates)), len(WIDTHS)), np.float32)
    tensors = {**file.tensors, "keep": np.full(rates, 0.5, np.float32), "weights": weights}
    if allowed:
        replace(file, tensors=tensors)
    else:
        with pytest.raises(InvalidConfig, match=rf"keep: \({rates},\) is not allowed; from 1 to 8 rates"):
            replace(file, tensors=tensors)


@pytest.mark.parametrize("report", [[], None, "told", 7])
def test_a_report_that_is_none_is_refused(report: Any) -> None:
    with pytest.raises(InvalidConfig, match="report"):
        replace(made(), report=report)


def test_what_is_missing_or_unknown_is_named() -> None:
    file = made()
    without = {name: one for name, one in file.tensors.items() if name != "triple.keys"}
    with pytest.raises(InvalidConfig, match=r"with triple\.keys"):
        replace(file, tensors=without)
    with pytest.raises(InvalidConfig, match="form"):
        replace(file, form="crystal ball")
    with pytest.raises(InvalidConfig, match="vocabulary"):
        replace(file, vocabulary=0)
    with pytest.raises(Damaged):
        PathsFile.parse(file.dump()[:-1])


@pytest.mark.parametrize("report", [[], None, "text", 3])
def test_a_report_that_is_no_object_is_refused_where_it_is_read(report: Any) -> None:
    file = made()
    object.__setattr__(file, "report", report)  # as another program would write it
    with pytest.raises(Damaged, match="report"):
        PathsFile.parse(file.dump())
