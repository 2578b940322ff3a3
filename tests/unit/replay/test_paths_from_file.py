"""A replay's routing paths by a file: for whom, and of which traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from greenroom.cli.main import main
from greenroom.core.errors import InvalidConfig
from greenroom.policies.registry import create_policy
from greenroom.replay.simulation.paths_from_file import PathsFromFile
from greenroom.replay.traces.token_numbers import texts_digest
from greenroom.replay.traces.trace_file import TraceError
from tests.paths_files import empty_tables
from tests.unit.replay.traces import trace_of

BARE = trace_of(30, 20, layers=3, k=2, experts=6)
IDS = replace(BARE, token=np.arange(50) % 7)
TEXTS = replace(IDS, token_texts=tuple("abcdefg"))
FILE = empty_tables((6, 6, 6))
OF_TEXTS = replace(FILE, report={"numbered_texts": texts_digest(TEXTS)})


def test_only_policies_that_predict_by_it_are_foretold() -> None:
    made = PathsFromFile(FILE)
    catalogue = BARE.catalogue()
    foretold = made(create_policy("expertflow", catalogue=catalogue), IDS)
    assert foretold is not None
    assert foretold.chances(np.zeros(3, np.int64), np.arange(3), np.arange(3)).shape == (3, 18)
    assert made(create_policy("lru", catalogue=catalogue), IDS) is None


def test_it_foretells_traces_of_the_tokens_that_it_was_made_of() -> None:
    PathsFromFile(FILE).check(IDS)
    PathsFromFile(OF_TEXTS).check(TEXTS)
    others = replace(TEXTS, token_texts=tuple("gabcdef"))
    for file, trace, said in (
        (FILE, TEXTS, "'ids of a model'.*made from this trace alone, whose tokens are texts"),
        (OF_TEXTS, IDS, "'numbers of texts'.*made from ids of the model, as this trace has them"),
        (OF_TEXTS, others, "'numbers of other texts'.*made from other texts, or from several traces"),
    ):
        with pytest.raises(InvalidConfig, match=said):
            PathsFromFile(file).check(trace)
    with pytest.raises(TraceError, match="no array token"):
        PathsFromFile(FILE).check(BARE)
    with pytest.raises(InvalidConfig, match="one of this model"):
        PathsFromFile(empty_tables((4, 4))).check(IDS)


def test_numbers_of_texts_foretell_no_model() -> None:
    FILE.check_model((6, 6, 6), 1000)
    OF_TEXTS.check_model((6, 6, 6))
    with pytest.raises(InvalidConfig, match="numbers of texts"):
        OF_TEXTS.check_model((6, 6, 6), 1000)


def test_the_command_takes_the_file(tmp_path: Path) -> None:
    trace, file = tmp_path / "t.npz", tmp_path / "paths.safetensors"
    IDS.save(trace)
    FILE.write(file)
    command = ["replay", str(trace), "--link", "1GiB/s", "--expert-bytes", "1MiB", "--budget", "50%", "--jobs", "1"]
    result = CliRunner().invoke(main, [*command, "--policy", "expertflow", "--paths", str(file)])
    assert result.exit_code == 0, result.output
    BARE.save(trace)
    result = CliRunner().invoke(main, [*command, "--policy", "expertflow", "--paths", str(file)])
    assert result.exit_code != 0
    assert "no array token" in result.output
