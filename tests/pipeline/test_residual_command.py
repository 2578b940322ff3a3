"""From prompts to maps of the residual stream, and from them to a worker that foresees by them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from greenroom.core.artifacts.residual_file import ResidualFile
from greenroom.core.errors import InvalidConfig
from greenroom.moe.routing import residual_fit
from greenroom.moe.routing.router_look_ahead import LookAhead
from greenroom.policies.registry import create_policy
from greenroom.worker.model.config import WorkerConfig
from greenroom.worker.model.model_runtime import ModelRuntime
from tests.pipeline.commands import complaint_of
from tests.pipeline.commands import output_of as run
from tests.short_fits import fit_with

pytestmark = pytest.mark.usefixtures("pack_cache")

PROMPTS = "\n".join(f"{number} and {number + 1} make" for number in range(24))


@pytest.fixture(scope="module", params=[50, pytest.param(3000, marks=pytest.mark.full)], ids="{} steps".format)
def made(request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("residual") / "r.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        fit_with(patch, residual_fit, steps=request.param)
        said = run(
            "residual", "fit", str(checkpoint), "--prompts", "-", "--raw", "--max-tokens", "40", "--rank", "4",
            "--expert-memory", "100%", "--out", str(out), "--cache-dir", str(out.parent), text=PROMPTS,
        )  # fmt: skip
    assert f"rank 4, SiLU, 704 B, fitted to 24 sequences of {checkpoint}" in said, said
    assert "2 ahead: " in said
    return out


def test_maps_are_fitted_to_prompts_and_shown(made: Path, checkpoint: Path) -> None:
    shown = json.loads(run("residual", "show", str(made), "--json"))
    assert (shown["rank"], shown["ahead"], shown["sequences"], shown["model"]) == (4, 2, 24, str(checkpoint))
    assert len(shown["held_out_recall"]) == 2


def test_a_worker_foresees_by_those_in_the_models_folder_or_those_it_is_given(
    made: Path, checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "m"
    shutil.copytree(checkpoint, model)
    one = ("generate", "one", "--model", str(model), "--raw", "--max-tokens", "8", "--expert-memory", "40%")
    run(*one, "--policy", "duoserve", "--residual", str(made))
    with ModelRuntime(WorkerConfig(str(model), policy="look-ahead", expert_memory="40%", residual=made)) as worker:
        assert isinstance(worker.hooks.look_ahead, LookAhead)
        assert worker.hooks.look_ahead._maps is not None
        assert f"policy look-ahead with the maps of {made}, fidelity exact" in worker.describe()
    shutil.copy(made, model / "residual.safetensors")
    assert "with the maps of" in run(*one, "--policy", "look-ahead")
    assert "can not be used" not in caplog.text
    literal = ("--policy", "duoserve:literal=true", "--expert-mlp", str(made))  # runs no router ahead
    assert "that `greenroom expert-mlp fit` made" in run(*one, *literal, status=1), "the folder's file is left alone"
    assert "duoserve:literal=true runs no router ahead: leave it out" in run(
        *one, *literal, "--residual", str(made), status=1
    )
    (model / "residual.safetensors").write_bytes(b"nothing")
    run(*one, "--policy", "look-ahead")
    assert "routers are run ahead as they are: the file in the model's folder can not be used" in caplog.text
    assert "lru runs no router ahead: leave it out, or choose" in run(
        *one, "--policy", "lru", "--residual", str(made), status=1
    )
    assert "that `greenroom residual fit` made" in run(
        *one, "--residual", str(model / "residual.safetensors"), status=1
    )


def test_it_is_said_where_no_router_is_run_ahead_in_whose_place_they_could_answer(
    made: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = WorkerConfig(str(checkpoint), policy="look-ahead", expert_memory="60%", residual=made)
    with ModelRuntime(config, policy=lambda catalogue: create_policy("lru", catalogue=catalogue)):
        assert f"{made} does nothing here" in caplog.text


def test_a_file_of_another_model_is_refused(made: Path, checkpoint: Path, tmp_path: Path) -> None:
    known, wider = ResidualFile.read(made), tmp_path / "wider.safetensors"
    form = known.of._replace(hidden=2 * known.of.hidden)
    maps = [one._replace(down=np.zeros((form.hidden, form.rank), dtype=np.float16)) for one in known.layers]
    about = {"model": "", "experts_per_layer": known.experts_per_layer, "sequences": 1}
    ResidualFile.of_layers(form, maps, **about).write(wider)
    with pytest.raises(InvalidConfig, match=f"one of this model.* rows of {known.of.hidden} numbers"):
        ModelRuntime(WorkerConfig(str(checkpoint), policy="look-ahead", expert_memory="60%", residual=wider))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "give --prompts, to run them: recorded routing does not hold"),
        (("--trace", "t.npz"), "No such option"),
        (("--prompts", "-", "--out", "/nowhere/r"), "there is no folder /nowhere"),
    ],
)
def test_mistakes_are_explained(arguments: tuple[str, ...], why: str) -> None:
    assert why in complaint_of("residual", "fit", *arguments)
