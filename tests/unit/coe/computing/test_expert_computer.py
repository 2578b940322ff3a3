from __future__ import annotations

import json
import threading
import unicodedata
import weakref
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoImageProcessor

from greenroom.coe.computing import outputs
from greenroom.coe.computing.expert_computer import ExpertComputer
from greenroom.coe.computing.expert_result import ExpertResult
from greenroom.coe.computing.images import decode_image
from greenroom.coe.computing.inputs import Preparations, Prepared, TextPreparation
from greenroom.coe.computing.intermediates import intermediate_bytes
from greenroom.core.errors import CorruptCheckpoint, ExpertFailed, InvalidRequest, UnsupportedModel
from greenroom.experts.pack.layout import ExpertWeights
from tests.contract.coe.single_expert import collaborate, own_model, record_of
from tests.random_experts import (
    DETECTORS,
    FAMILIES,
    WORDS,
    encoded,
    random_image,
    save_expert,
    small_tokenizer,
    some_inputs,
)


def test_a_broken_input_leaves_the_batch(tmp_path: Path) -> None:
    experts = collaborate(tmp_path / "one.toml", [save_expert("resnet", tmp_path / "one")])
    record = record_of(experts, 0)
    good = some_inputs("resnet", 2)
    outcomes = experts.computer.compute(0, [good[0], b"no image", good[1], "a text"], record)
    assert [type(outcome) for outcome in outcomes] == [ExpertResult, InvalidRequest, ExpertResult, InvalidRequest]
    assert [outcomes[0], outcomes[2]] == experts.computer.compute(0, good, record)


def test_nothing_but_broken_inputs(tmp_path: Path) -> None:
    experts = collaborate(tmp_path / "one.toml", [save_expert("bert", tmp_path / "one")])
    inputs: list[Any] = ["", "  ", b"\xff", random_image()]
    outcomes = experts.computer.compute(0, inputs, record_of(experts, 0))
    assert [str(outcome).partition(";")[0].partition(":")[0] for outcome in outcomes] == [
        "the input is empty", "the input is empty", "the input is no UTF-8", "the input is an image",
    ]  # fmt: skip


def test_what_a_processor_can_not_take_leaves_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which images these are is the processor's own, so none is known beforehand."""
    experts = collaborate(tmp_path / "one.toml", [save_expert("resnet", tmp_path / "one")])
    preparation: Any = experts.computer._preparations[0]
    original = preparation.processor

    def picky(images: list[Any], **options: Any) -> Any:
        if any(image.width == 7 for image in images):
            raise ValueError("seven is not for me")
        return original(images=images, **options)

    monkeypatch.setattr(preparation, "processor", picky)
    good = some_inputs("resnet", 2)
    outcomes = experts.computer.compute(0, [good[0], encoded(random_image(width=7)), good[1]], record_of(experts, 0))
    assert [type(outcome) for outcome in outcomes] == [ExpertResult, InvalidRequest, ExpertResult]
    assert "seven is not for me" in str(outcomes[1])


def test_of_a_batch_one_image_at_a_time_is_decoded_and_all_are_computed_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = collaborate(tmp_path / "one.toml", [save_expert("resnet", tmp_path / "one")])
    record = record_of(experts, 0)
    alive: list[weakref.ref[Image.Image]] = []

    def watched(*given: Any) -> Image.Image:
        assert not any(image() for image in alive)
        made = decode_image(*given)
        alive.append(weakref.ref(made))
        return made

    monkeypatch.setattr("greenroom.coe.computing.inputs.decode_image", watched)
    picky, original = experts.computer._preparations[0], cast("Any", experts.computer._preparations[0]).processor

    def refusing(images: list[Any], **options: Any) -> Any:
        if images[0].width == 7:
            raise ValueError("seven is not for me")
        return original(images=images, **options)

    monkeypatch.setattr(picky, "processor", refusing)
    refused = encoded(random_image(width=7))
    given = [*(encoded(random_image(seed)) for seed in range(3)), refused, refused, encoded(random_image(3))]
    batches, forward = [], experts.computer.forward

    def counting(expert: int, prepared: Prepared, weights: ExpertWeights) -> Any:
        batches.append(len(prepared.sizes))
        return forward(expert, prepared, weights)

    monkeypatch.setattr(experts.computer, "forward", counting)
    outcomes = experts.computer.compute(0, given, record)
    assert [type(each) for each in outcomes] == [*[ExpertResult] * 3, *[InvalidRequest] * 2, ExpertResult]
    assert (len(alive), batches) == (6, [4])


@pytest.mark.parametrize("family", DETECTORS)
def test_boxes_do_not_depend_on_whose_images_are_in_the_batch(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A landscape and a portrait, which a processor would pad to one canvas: as transformers answers each alone."""
    monkeypatch.setattr(outputs, "LEAST_BOX_SCORE", 0.0)  # random weights are sure of nothing
    folder = save_expert(family, tmp_path / "one")
    experts = collaborate(tmp_path / "one.toml", [folder])
    record, model = record_of(experts, 0), own_model(family, folder, torch.float32)
    given = [random_image(0, 96, 64), random_image(1, 64, 96), random_image(2, 96, 64), random_image(3, 70, 70)]
    together = experts.computer.compute(0, list(given), record)
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    for image, outcome in zip(given, together, strict=True):
        (alone,) = experts.computer.compute(0, [image], record)
        with torch.inference_mode():
            made = model(**processor(images=[image], return_tensors="pt"))
        (theirs,) = processor.post_process_object_detection(made, 0.0, [(image.height, image.width)])
        expected = sorted(zip(theirs["scores"].tolist(), theirs["boxes"].tolist(), strict=True), reverse=True)
        for own in (alone, outcome):
            assert isinstance(own, ExpertResult)
            assert len(own.boxes) == len(expected) > 0
            for box, (score, corners) in zip(own.boxes, expected, strict=True):
                assert box.score == pytest.approx(score, abs=1e-5)
                assert (box.left, box.top, box.right, box.bottom) == pytest.approx(corners, abs=1e-3)


@pytest.mark.parametrize("family", DETECTORS)
def test_parts_are_there_together_and_computed_one_after_the_other(tmp_path: Path, family: str) -> None:
    experts = collaborate(tmp_path / "one.toml", [save_expert(family, tmp_path / "one")])
    record = record_of(experts, 0)
    wide, high = random_image(0, 96, 64), random_image(1, 64, 96)
    alone, mixed, alike = (
        intermediate_bytes(experts.computer, 0, list(batch), record)
        for batch in ([wide], [wide, high, wide, high], [wide] * 4)
    )
    assert alone < mixed < alike


@pytest.mark.parametrize(("setting", "value"), [("model_input_names", ["input_ids"]), ("padding_side", "left")])
def test_texts_of_unequal_length_are_parted_where_padding_would_be_seen(setting: str, value: object) -> None:
    """The model gets no mask of it, or it moves the texts' positions."""
    texts = ["good", "bad part", "worse"]
    tokenizer = small_tokenizer()
    (part,) = prepared_by(TextPreparation(tokenizer, 10), texts)
    assert (part.places, part.tensors["input_ids"].shape) == ((0, 1, 2), (3, 4))
    setattr(tokenizer, setting, value)
    parts = prepared_by(TextPreparation(tokenizer, 10), texts)
    assert [(part.places, part.tensors["input_ids"].shape) for part in parts] == [((0, 2), (2, 3)), ((1,), (1, 4))]


def prepared_by(preparation: TextPreparation, texts: list[str]) -> list[Prepared]:
    return preparation.together([preparation.read(text, "the input") for text in texts])


def test_texts_are_padded_as_the_tokenizer_does_it() -> None:
    texts = ["good", "bad part", "a b c d e"]
    (part,) = prepared_by(TextPreparation(small_tokenizer(), 10), texts)
    expected = small_tokenizer()(texts, padding=True, return_tensors="pt")
    assert set(part.tensors) == set(expected)
    assert all(torch.equal(part.tensors[name], tensor) for name, tensor in expected.items())


def test_without_a_limit_of_its_own_a_text_may_have_so_many_tokens() -> None:
    """Memory has a limit."""
    preparation = TextPreparation(small_tokenizer(), None)
    assert preparation.read("good " * 4000, "text").tensors["input_ids"].shape == (1, 4002)
    with pytest.raises(InvalidRequest, match="text has 5002 tokens; the expert takes at most 4096"):
        preparation.read("good " * 5000, "text")
    with pytest.raises(InvalidRequest, match="text has 70000 characters; the expert takes at most 65536 characters"):
        preparation.read("x" * 70_000, "text")


@pytest.mark.parametrize("side", ["left", "right"])
@given(st.lists(st.text("ab \n", min_size=1, max_size=60), min_size=1), st.integers(3, 8))
def test_of_a_very_long_text_only_what_is_kept_is_read_and_gives_the_same_tokens(
    side: str, parts: list[str], longest: int
) -> None:
    """Or it is refused: then what was read has too few."""
    text = " ".join(parts)
    assume(text.strip())
    preparation = TextPreparation(small_tokenizer(), longest)
    preparation.tokenizer.truncation_side = side
    expected = preparation.tokenizer(text, truncation=True, max_length=longest)["input_ids"]
    preparation.characters = 40
    try:
        read = preparation.read(text, "text")
    except InvalidRequest:
        within = text[:40] if side == "right" else text[-40:]
        assert len(preparation.tokenizer(within)["input_ids"]) <= longest + 1  # the word that is cut is not read
        assert len(text) > 40
    else:
        assert read.tensors["input_ids"].tolist() == [expected]


def test_what_a_tokenizer_makes_of_characters_counts() -> None:
    """U+FDFA is 18 characters by compatibility decomposition."""
    preparation = TextPreparation(small_tokenizer(), 8)
    with mock.patch.object(preparation, "tokenizer", wraps=preparation.tokenizer) as tokenizer:
        tokenizer.truncation_side = "right"
        preparation.read("\ufdfa " * 60_000, "text")
    read = max((call.args[0] for call in tokenizer.call_args_list), key=len)
    assert len(read) > 1000
    assert len(unicodedata.normalize("NFKD", read)) <= preparation.characters


def test_a_million_characters_are_not_tokenised() -> None:
    preparation = TextPreparation(small_tokenizer(), 128)
    with mock.patch.object(preparation, "tokenizer", wraps=preparation.tokenizer) as tokenizer:
        tokenizer.truncation_side = "right"
        preparation.read("good " * 200_000, "text")
    assert max(len(call.args[0]) for call in tokenizer.call_args_list) <= preparation.characters == 65_536


def test_weights_that_are_no_numbers_fail_every_request(tmp_path: Path) -> None:
    experts = collaborate(tmp_path / "one.toml", [save_expert("resnet", tmp_path / "one")])
    record = record_of(experts, 0)
    record[0].fill_(float("nan"))
    outcomes = experts.computer.compute(0, some_inputs("resnet", 3), record)
    assert all(isinstance(outcome, ExpertFailed) for outcome in outcomes)


def test_a_processor_that_keeps_sizes_is_refused(tmp_path: Path) -> None:
    """Else what a batch takes would have no bound."""
    file = save_expert("vit", tmp_path / "one") / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"do_resize": False}))
    with pytest.raises(UnsupportedModel, match=r"experts\.one: .* neither resizes nor crops"):
        collaborate(tmp_path / "one.toml", [file.parent])


def test_experts_with_equal_settings_share_their_preparation(tmp_path: Path) -> None:
    folders = [save_expert("resnet", tmp_path / f"expert{seed}", seed=seed) for seed in range(3)]
    settings = json.loads((folders[2] / "preprocessor_config.json").read_text())
    (folders[2] / "preprocessor_config.json").write_text(json.dumps(settings | {"crop_pct": 0.5}))
    experts = collaborate(tmp_path / "one.toml", folders)
    first, second, third = experts.computer._preparations
    assert first is second is not third


@pytest.mark.parametrize(
    ("family", "file", "content", "message"),
    [
        ("resnet", "preprocessor_config.json", '{"image_processor_type": "Mine"}', r"experts\.one: pre.* is not valid"),
        ("yolos", "preprocessor_config.json", '{"image_processor_type": "ViTImageProcessor"}', r"finds no objects"),
        ("bert", "tokenizer.json", "{}", r"experts\.one: the tokenizer of .* is not valid"),
    ],
)
def test_settings_that_are_not_valid(tmp_path: Path, family: str, file: str, content: str, message: str) -> None:
    folder = save_expert(family, tmp_path / "one")
    (folder / file).write_text(content)
    with pytest.raises(CorruptCheckpoint, match=message):
        collaborate(tmp_path / "one.toml", [folder])


@pytest.mark.parametrize(("family", "longest"), [("bert", 40), ("distilbert", 40), ("roberta", 38)])
def test_long_texts_are_cut_where_the_model_has_no_more_positions(tmp_path: Path, family: str, longest: int) -> None:
    experts = collaborate(tmp_path / "one.toml", [save_expert(family, tmp_path / "one")])
    (preparation,) = experts.computer._preparations
    assert isinstance(preparation, TextPreparation)
    assert preparation.longest == longest
    (outcome,) = experts.computer.compute(0, [" ".join(WORDS[4:] * 5)], record_of(experts, 0))
    assert isinstance(outcome, ExpertResult)


def sentence_transformer(folder: Path, **pooling: bool) -> Path:
    save_expert("bert_embedding", folder)
    steps = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    (folder / "modules.json").write_text(
        json.dumps([{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in steps])
    )
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 12}))
    return folder


def test_an_embedding_is_pooled_as_its_files_say(tmp_path: Path) -> None:
    folder = sentence_transformer(tmp_path / "one", pooling_mode_cls_token=True, pooling_mode_mean_tokens=False)
    experts = collaborate(tmp_path / "one.toml", [folder])
    record = record_of(experts, 0)
    (prepared,) = experts.computer.prepare(0, ["a b c", " ".join(WORDS[4:24])])
    assert prepared.tensors["input_ids"].shape == (2, 12)
    hidden = experts.computer.forward(0, prepared, record).last_hidden_state[0, 0]
    (outcome, _) = experts.computer.results(0, prepared, experts.computer.forward(0, prepared, record))
    assert isinstance(outcome, ExpertResult)
    assert outcome.embedding is not None
    assert np.allclose(outcome.embedding, (hidden / hidden.norm()).numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("pooling", "message"),
    [({"pooling_mode_max_tokens": True}, "pools by pooling_mode_max_tokens"), ({}, "pools by nothing")],
)
def test_another_pooling_is_refused(tmp_path: Path, pooling: dict[str, bool], message: str) -> None:
    folder = sentence_transformer(tmp_path / "one", **pooling)
    with pytest.raises(UnsupportedModel, match=rf"experts\.one: .*{message}; served"):
        collaborate(tmp_path / "one.toml", [folder])


def test_a_step_that_is_not_known_is_refused(tmp_path: Path) -> None:
    folder = sentence_transformer(tmp_path / "one", pooling_mode_mean_tokens=True)
    (folder / "modules.json").write_text(json.dumps([{"path": "3_Dense", "type": "models.Dense"}]))
    with pytest.raises(UnsupportedModel, match="has a step 'Dense'"):
        collaborate(tmp_path / "one.toml", [folder])


@pytest.mark.parametrize("family", ["resnet", "bert"])
def test_executors_compute_beside_each_other(tmp_path: Path, family: str) -> None:
    """Each has its own skeleton, and all share preparations and weights."""
    folders = [save_expert(family, tmp_path / f"expert{seed}", seed=seed) for seed in range(2)]
    experts = collaborate(tmp_path / "one.toml", folders)
    records = [record_of(experts, expert) for expert in range(2)]
    inputs = some_inputs(family, 3)
    expected = [experts.computer.compute(expert, inputs, records[expert]) for expert in range(2)]
    assert expected[0] != expected[1]
    preparations = Preparations()
    wrong: list[object] = []

    def execute(first: int) -> None:
        try:
            computer = ExpertComputer(experts.collaboration, experts.architectures, preparations)
            for turn in range(20):
                expert = (first + turn) % 2
                if computer.compute(expert, inputs, records[expert]) != expected[expert]:
                    wrong.append((first, turn))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=execute, args=(first,)) for first in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


@pytest.mark.parametrize("family", FAMILIES)
def test_intermediates_grow_with_the_batch(tmp_path: Path, family: str) -> None:
    experts = collaborate(tmp_path / "one.toml", [save_expert(family, tmp_path / "one")])
    record = record_of(experts, 0)
    (one,) = some_inputs(family, 1)
    found = [intermediate_bytes(experts.computer, 0, [one] * count, record) for count in (1, 2, 4, 8)]
    (prepared,) = experts.computer.prepare(0, [one])
    given = sum(tensor.nbytes for tensor in prepared.tensors.values())
    assert found[0] > given
    steps = np.diff(found) / np.array([1, 2, 4])
    assert steps[-1] > given
    assert (np.diff(steps) >= 0).all(), "the most of several lines, so a line between two batches is never below it"


def test_intermediates_are_counted_while_they_live(tmp_path: Path) -> None:
    experts = collaborate(tmp_path / "one.toml", [save_expert("resnet", tmp_path / "one")])
    record = record_of(experts, 0)
    inputs = some_inputs("resnet", 4)
    (prepared,) = experts.computer.prepare(0, inputs)
    outputs: list[torch.Tensor] = []
    (skeleton,) = experts.computer._skeletons.values()
    with skeleton.using(record) as model, torch.no_grad():
        for module in model.modules():
            module.register_forward_hook(
                lambda _, __, made: outputs.append(made) if isinstance(made, torch.Tensor) else None
            )
        model(**prepared.tensors)
    largest = max(tensor.nbytes for tensor in outputs)
    everything = sum(tensor.nbytes for tensor in outputs)
    found = intermediate_bytes(experts.computer, 0, inputs, record)
    assert largest < found < everything
