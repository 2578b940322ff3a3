"""What a collaboration's definition may say, and what the errors name."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.coe.graph.definition_file import (
    CoeDefinition,
    ExpertDefinition,
    RouterDefinition,
    check,
    check_labels,
    read_definition,
)
from greenroom.core.collaboration import (
    MAX_VALUES,
    MAX_VALUES_BYTES,
    VALUE_BYTES,
    CollaborationCard,
    InputKind,
    OutputKind,
)
from greenroom.core.errors import InvalidConfig
from greenroom.core.messages import Member, MemberKind, decode, encode
from greenroom.fabric.log.base import Topic
from greenroom.worker.inference_engine import model_card

BOARD = """
name = "board"

[router]
parameter = "component"
first = { R0402 = "resistor", R0603 = "resistor", U7 = "chip" }

[quantities]
R0402 = 120
R0603 = 40
U7 = 40

[experts.resistor]
model = "experts/resistor"
[[experts.resistor.next]]
expert = "turned"
label = "good"
probability = 0.5

[experts.chip]
model = "experts/chip"
[[experts.chip.next]]
expert = "careful"
below_score = 0.6
[[experts.chip.next]]
expert = "turned"
labels = ["good", "worn"]
least_score = 0.6

[experts.turned]
model = "experts/turned"

[experts.careful]
model = "someone/careful"
revision = "v2"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "board.toml"
    path.write_text(text)
    return path


def test_a_definition_is_read(tmp_path: Path) -> None:
    board = read_definition(written(tmp_path, BOARD))
    assert list(board.experts) == ["resistor", "chip", "turned", "careful"]
    assert board.values == {"R0402": "resistor", "R0603": "resistor", "U7": "chip"}
    assert board.experts["careful"].revision == "v2"
    assert board.experts["chip"].next[1].all_labels == {"good", "worn"}


def test_without_first_the_value_names_an_expert_that_no_edge_leads_to(tmp_path: Path) -> None:
    text = BOARD.replace('first = { R0402 = "resistor", R0603 = "resistor", U7 = "chip" }', "")
    text = text.replace("R0402 = 120\nR0603 = 40\nU7 = 40", "")
    assert read_definition(written(tmp_path, text)).values == {"resistor": "resistor", "chip": "chip"}


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('expert = "careful"', 'expert = "carefull"', ["experts.chip.next[0].expert", "'carefull'", "careful"]),
        ('U7 = "chip" }', 'U7 = "chips" }', ["router.first.U7", "'chips'", "chip"]),
        ("U7 = 40", "U8 = 40", ["quantities", "'U8'", "U7"]),
        ("U7 = 40", "U7 = 0", ["quantities", "0"]),
        ("U7 = 40", "U7 = inf", ["quantities", "<= 1"]),
        ('parameter = "component"', "", ["router", "either"]),
        ('parameter = "component"', 'parameter = "component"\nexpert = "chip"', ["router", "either"]),
        ("probability = 0.5", "probability = 1.5", ["probability"]),
        ('label = "good"', "labels = []", ["labels", "length >= 1"]),
        ('name = "board"', 'name = "board/versions/1"', ["name", "without 'versions'"]),
        ('name = "board"', 'name = "board/infer"', ["name", "without 'infer'"]),
        ('name = "board"', 'name = "../board"', ["name", "without '..'"]),
        ('label = "good"\nprobability = 0.5', "probability = 0.5", ["experts.resistor.next", "1 in sum"]),
        (
            "below_score = 0.6",
            "below_score = 0.6\nprobability = 0.7\n"
            "[[experts.chip.next]]\nexpert = 'turned'\nlabel = 'x'\nprobability = 0.4",
            ["experts.chip.next", "at most 1"],
        ),
        ("below_score = 0.6", "", ["experts.chip.next[0]", "a condition"]),
        ("below_score = 0.6", "below_score = 0.6\nleast_score = 0.6", ["experts.chip.next[0]", "least_score"]),
        ("least_score = 0.6", "least = 0.6", ["least"]),
        ('revision = "v2"', 'revision = "v2"\n[experts.nobody]\nmodel = "m"', ["'nobody'", "leads to"]),
        (
            'model = "experts/turned"',
            'model = "experts/turned"\n[[experts.turned.next]]\nexpert = "resistor"',
            ["resistor → turned → resistor", "no circle"],
        ),
        *(
            ('parameter = "component"', f'parameter = "{name}"', ["router.parameter", repr(name), "another name"])
            for name in ("priority", "timeout", "slo_e2e_ms", "binary_data_output", "image", "text")
        ),
        ('name = "board"', "", ["name"]),
        ("[router]", "[router", ["TOML"]),
    ],
)
def test_what_can_not_be_is_refused_by_file_and_name(tmp_path: Path, old: str, new: str, named: list[str]) -> None:
    assert old in BOARD
    path = written(tmp_path, BOARD.replace(old, new))
    with pytest.raises(InvalidConfig) as caught:
        read_definition(path)
    for part in ["board.toml", *named]:
        assert part in str(caught.value)


def of_values(values: list[str]) -> str:
    first = ", ".join(f'"{value}" = "chip"' for value in values)
    return f"""name = "board"
[router]
parameter = "component"
first = {{ {first} }}
[experts.chip]
model = "experts/chip"
"""


def of_length(count: int, length: int) -> list[str]:
    return [f"{number:06}".ljust(length, "ä") for number in range(count)]


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        (of_length(MAX_VALUES + 1, 6), "16385 values"),
        (of_length(5_000, 120), "5000 values of 1185000 bytes"),
    ],
    ids=["many", "long"],
)
def test_more_values_than_a_worker_can_announce_are_refused(tmp_path: Path, values: list[str], wrong: str) -> None:
    path = written(tmp_path, of_values(values))
    with pytest.raises(InvalidConfig, match=r"board\.toml: router\.first") as caught:
        read_definition(path)
    assert wrong in str(caught.value)
    experts = {value: ExpertDefinition(model="m") for value in values}
    with pytest.raises(InvalidConfig, match=r"board\.toml: router\.parameter"):
        check(CoeDefinition(name="b", router=RouterDefinition(parameter="p"), experts=experts), "board.toml")
    routed = {**experts, "router": ExpertDefinition(model="m")}
    check(CoeDefinition(name="b", router=RouterDefinition(expert="router"), experts=routed))  # labels: not announced


@pytest.mark.parametrize("length", [6, 29, 52, 120, 200])
def test_what_passes_can_be_announced(length: int) -> None:
    """The most that pass, in the record that all other members would read."""
    values = of_length(MAX_VALUES, length)
    size = len(values[0].encode()) + VALUE_BYTES
    values = values[: min(MAX_VALUES, MAX_VALUES_BYTES // size)]
    experts = {value: ExpertDefinition(model="m") for value in values}
    definition = CoeDefinition(name="b", router=RouterDefinition(parameter="p"), experts=experts)
    check(definition)
    card = CollaborationCard(takes=tuple(InputKind), parameter="p" * 200, values=tuple(values), gives=tuple(OutputKind))
    member = Member(
        member=MemberKind.WORKER,
        instance="i" * 256,
        address="a" * 200,
        ttl_ms=10_000,
        model=model_card("n" * 256, "d" * 64, card),
    )
    assert decode(encode(member), Member) == member
    assert len(encode(member)) < Topic("members").max_message_bytes


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"board\.toml"):
        read_definition(tmp_path / "board.toml")


def test_an_expert_that_routes_comes_first_and_says_itself_what_follows(tmp_path: Path) -> None:
    text = BOARD.replace('parameter = "component"', 'expert = "kind"')
    text += '\n[experts.kind]\nmodel = "experts/kind"\n'
    board = read_definition(written(tmp_path, text))
    assert board.router.expert == "kind"
    with pytest.raises(InvalidConfig, match=r"experts\.kind\.next"):
        read_definition(written(tmp_path, text + '[[experts.kind.next]]\nexpert = "chip"\n'))
    with pytest.raises(InvalidConfig, match=r"experts\.chip\.next.*comes first"):
        read_definition(written(tmp_path, text.replace('expert = "careful"', 'expert = "kind"')))
    with pytest.raises(InvalidConfig, match=r"router\.first\.U7"):
        read_definition(written(tmp_path, text.replace('U7 = "chip" }', 'U7 = "kind" }')))


def test_a_label_that_its_expert_never_gives_is_refused(tmp_path: Path) -> None:
    board = read_definition(written(tmp_path, BOARD))
    check_labels(board, {"resistor": ["good", "cracked"], "chip": ["good", "worn"]})
    with pytest.raises(InvalidConfig, match=r"experts\.chip\.next\[1\].*'worn'"):
        check_labels(board, {"resistor": ["good"], "chip": ["good", "cracked"]})
    with pytest.raises(InvalidConfig, match=r"experts\.resistor\.next\[0\].*'good'"):
        check_labels(board, {"chip": ["good", "worn"]})


def test_a_long_pipeline_is_no_circle(tmp_path: Path) -> None:
    experts = "".join(
        f'[experts.e{at}]\nmodel = "m"\n[[experts.e{at}.next]]\nexpert = "e{at + 1}"\n' for at in range(3000)
    )
    text = f'name = "long"\n[router]\nparameter = "p"\n{experts}[experts.e3000]\nmodel = "m"\n'
    assert len(read_definition(written(tmp_path, text)).experts) == 3001
