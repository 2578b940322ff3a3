from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.coe.computing.all_resident import AllResident
from greenroom.coe.loading.collaboration import read_collaboration
from greenroom.core.errors import ExpertFailed, InvalidRequest
from tests.random_experts import encoded, random_image, save_board, save_expert

ROUTED = """
name = "routed"
[router]
expert = "kind"
first = { good = "resistor", worn = "chip"FIRST }
[experts.kind]
model = "experts/kind"
[experts.resistor]
model = "experts/resistor"
[experts.chip]
model = "experts/chip"
"""


def test_a_request_goes_along_its_edges(tmp_path: Path) -> None:
    board = AllResident.load(read_collaboration(save_board(tmp_path)), cache_dir=tmp_path / "cache")
    image = encoded(random_image())
    assert [stage.expert for stage in board.run(image, "R1")] == ["resistor", "turned"]
    assert [stage.expert for stage in board.run(image, "U1")] == ["chip", "turned"]


def test_conditions_decide_on_the_result(tmp_path: Path) -> None:
    """The edge is taken for the label that the expert gives, and not for another."""
    file = save_board(tmp_path)
    image = encoded(random_image())
    (label,) = (
        stage.result.label
        for stage in AllResident.load(read_collaboration(file), cache_dir=tmp_path / "cache").run(image, "R1")[:1]
    )
    for wanted, path in ((label, ["resistor", "turned"]), ("burnt", ["resistor"])):
        save_expert("resnet", tmp_path / "experts" / "resistor", labels=_with("burnt", label or ""))
        file.write_text(file.read_text().replace('labels = ["good", "worn", "broken"]', f'label = "{wanted}"'))
        board = AllResident.load(read_collaboration(file), cache_dir=tmp_path / "cache")
        assert [stage.expert for stage in board.run(image, "R1")] == path
        file = save_board(tmp_path)


def _with(new: str, kept: str) -> tuple[str, ...]:
    """The labels, ``kept`` in its place and one of the others renamed."""
    labels = ["good", "worn", "broken"]
    other = next(place for place, label in enumerate(labels) if label != kept)
    labels[other] = new
    return tuple(labels)


@pytest.mark.parametrize("named", [True, False])
def test_an_expert_that_routes(tmp_path: Path, named: bool) -> None:
    for seed, name in enumerate(("kind", "resistor", "chip")):
        save_expert("resnet", tmp_path / "experts" / name, seed=seed)
    file = tmp_path / "routed.toml"
    file.write_text(ROUTED.replace("FIRST", ', broken = "chip"' if named else ""))
    board = AllResident.load(read_collaboration(file), cache_dir=tmp_path / "cache")
    followed = {"good": "resistor", "worn": "chip", "broken": "chip"}
    image = encoded(random_image())
    (outcome,) = board.computer.compute(0, [image], board.weights[0])
    label = getattr(outcome, "label", None)
    if label == "broken" and not named:
        with pytest.raises(ExpertFailed, match="for which no expert is named"):
            board.run(image)
    else:
        assert [stage.expert for stage in board.run(image)] == ["kind", followed[str(label)]]


def test_an_unknown_value_and_a_broken_image(tmp_path: Path) -> None:
    board = AllResident.load(read_collaboration(save_board(tmp_path)), cache_dir=tmp_path / "cache")
    with pytest.raises(InvalidRequest, match="'R9' is no value of the router"):
        board.run(encoded(random_image()), "R9")
    with pytest.raises(InvalidRequest, match="can not be decoded"):
        board.run(b"no image", "R1")
