"""``greenroom coe profile`` on the bundled board, and on boards of several kinds of experts."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from greenroom.cli.main import main
from greenroom.coe.computing.profiled_costs import executor_costs, largest_batches
from greenroom.coe.loading.collaboration import read_collaboration
from greenroom.core.coe_profile import dump_coe_profile, load_coe_profile
from greenroom.core.machine import machine_name
from greenroom.core.units import MIB
from greenroom.demo.board import bundled_board_path
from greenroom.demo.board.make import copy_board
from tests.coe_profiles import small_profile
from tests.plain_picture import plain_picture
from tests.quiet_transformers import no_progress_bars as no_progress_bars
from tests.random_experts import save_board, save_expert

PICTURES = ("batches", "latency", "memory", "trials", "usage")


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["coe", "profile", *arguments])
    return done.exit_code, done.output


def test_the_bundled_board(tmp_path: Path) -> None:
    output = tmp_path / "profile.json"
    code, out = run(
        str(bundled_board_path()), "--quick", "--output", str(output), "--cache-dir", str(tmp_path / "cache"),
        "--memory", "8MiB", "--executors", "2",
    )  # fmt: skip
    assert code == 0, out
    assert "K, ms" in out
    assert f"\n{output}\n" in out
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [f"profile-cpu-{name}.png" for name in PICTURES]

    profile = load_coe_profile(output)
    collaboration = read_collaboration(bundled_board_path())
    names = collaboration.graph.names
    profile.check_of(
        collaboration.name,
        {name: expert.architecture for name, expert in zip(names, collaboration.experts, strict=True)},
        str(output),
    )
    assert profile.said_of_machine(machine_name()) is None
    own = profile.kinds["cpu"]
    assert set(own.trials) == {1, 2}
    assert own.memory_bytes == 8 * MIB
    for count in own.trials:
        costs = executor_costs(profile, names, "cpu", count)
        assert all(costs.request_ms(expert) + costs.batch_ms_of(expert) > 0 for expert in range(len(names)))
        assert all(costs.load_ms(expert) > 0 for expert in range(len(names)))
        free = (own.memory_bytes - own.trials[count].expert_bytes) // count
        assert min(largest_batches(profile, names, "cpu", count, free).values()) >= 1
    for architecture in own.architectures.values():
        assert list(architecture.bytes_by_batch) == [1, 2, 4, 8]


def test_points_are_really_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples say where they go, and their experts are right: so requests go as they are replayed."""
    file = tmp_path / "board" / "board.toml"
    plain_picture(monkeypatch)
    copy_board(file.parent, 0, lambda *_: None)
    output = tmp_path / "profile.json"
    code, out = run(
        str(file), "--quick", "--no-plots", "--serve", "--output", str(output), "--memory", "8MiB",
        "--cache-dir", str(tmp_path / "cache"), "--executors", "2", "--requests", "60",
        "--samples", str(file.parent / "samples.jsonl"),
    )  # fmt: skip
    assert code == 0, out
    assert "really served, requests/s (replayed): " in out
    own = load_coe_profile(output).kinds["cpu"]
    trial = own.trials[own.executors]
    assert {trial.residents, trial.drawn, min(trial.per_s_by_residents)} <= trial.served_per_s.keys()
    assert all(0 < per_s < 1e5 for per_s in trial.served_per_s.values())
    assert all(not other.served_per_s for count, other in own.trials.items() if count != own.executors)


def test_images_and_detectors_with_samples_of_a_folder(tmp_path: Path) -> None:
    file = save_board(tmp_path / "board")
    samples = bundled_samples(tmp_path)
    code, out = run(
        str(file), "--quick", "--no-plots", "--cache-dir", str(tmp_path / "cache"), "--executors", "1",
        "--samples", str(samples), "--scheduling", "pull", "--draw",
    )  # fmt: skip
    assert code == 0, out
    profile = load_coe_profile(file.parent / "profile.json")
    assert {one.model_class for one in profile.architectures.values()} == {
        "ResNetForImageClassification",
        "YolosForObjectDetection",
    }
    (trial,) = profile.kinds["cpu"].trials.values()
    assert trial.residents == trial.drawn
    assert profile.usage["resistor"] == pytest.approx(0.75)


def bundled_samples(tmp_path: Path) -> Path:
    from greenroom.profiling.coe.sample_inputs import random_images

    folder = tmp_path / "samples"
    folder.mkdir()
    lines = []
    for number, data in enumerate(random_images(40, 30, 4, 0)):
        (folder / f"{number}.png").write_bytes(data)
        lines.append(json.dumps({"file": f"{number}.png", "experts": ["chip"] if number else ["resistor", "turned"]}))
    (folder / "samples.jsonl").write_text("\n".join(lines))
    return folder


def test_what_can_not_be_measured_is_said(tmp_path: Path) -> None:
    file = save_board(tmp_path / "board")
    quick = ("--quick", "--no-plots", "--cache-dir", str(tmp_path / "cache"))
    code, out = run(str(file), "--memory", "1KiB", "--executors", "1", *quick)
    assert code != 0
    assert "give at least" in out
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "image.png").write_bytes(b"no image")
    code, out = run(str(file), "--samples", str(broken), *quick)
    assert code != 0
    assert "experts.resistor can not be measured" in out.replace("\n", " ")
    code, out = run(str(file), "--count-usage", *quick)
    assert code != 0
    assert "--samples" in out


def test_texts(tmp_path: Path) -> None:
    """With random ones of the length that the model takes, and with a file of short ones."""
    lines = ['name = "mail"', "[router]", 'parameter = "language"']
    for name, family in (("english", "bert"), ("german", "bert"), ("meaning", "bert_embedding")):
        save_expert(family, tmp_path / "experts" / name, seed=len(name))
        lines += [f"[experts.{name}]", f'model = "experts/{name}"']
    file = tmp_path / "mail.toml"
    file.write_text("\n".join(lines))
    (tmp_path / "texts.txt").write_text("good\nbad board\n")
    bytes_of = []
    for more in ((), ("--samples", str(tmp_path / "texts.txt"))):
        code, out = run(
            str(file), "--quick", "--no-plots", "--cache-dir", str(tmp_path / "cache"), "--executors", "1", *more
        )
        assert code == 0, out
        profile = load_coe_profile(tmp_path / "profile.json")
        assert {one.model_class for one in profile.architectures.values()} == {
            "BertForSequenceClassification",
            "BertModel",
        }
        bytes_of.append([own.bytes_by_batch[8] for own in profile.kinds["cpu"].architectures.values()])
    assert bytes_of[1] <= bytes_of[0]


def test_other_files_are_not_written_over(tmp_path: Path) -> None:
    file = save_board(tmp_path / "board")
    taken = tmp_path / "taken.json"
    taken.write_text("{}")
    code, out = run(str(file), "--quick", "--no-plots", "--output", str(taken))
    assert code != 0
    assert "no profile of a collaboration" in out.replace("\n", " ")
    assert taken.read_text() == "{}"
    taken.write_bytes(dump_coe_profile(msgspec.structs.replace(small_profile(), collaboration="line")))
    code, out = run(str(file), "--quick", "--no-plots", "--output", str(taken))
    assert code != 0
    assert "the profile of 'line', another collaboration" in out.replace("\n", " ")


def test_usage_is_counted_from_samples_that_say_their_experts(tmp_path: Path) -> None:
    file = save_board(tmp_path / "board")
    samples = bundled_samples(tmp_path) / "samples.jsonl"
    output = tmp_path / "counted.json"
    code, out = run(
        str(file), "--quick", "--no-plots", "--cache-dir", str(tmp_path / "cache"), "--executors", "1",
        "--samples", str(samples), "--count-usage", "--output", str(output),
    )  # fmt: skip
    assert code == 0, out
    assert load_coe_profile(output).usage == {"resistor": 0.25, "turned": 0.25, "chip": 0.75}
