"""What the table of docs/architecture/checkpoints.md says of every family in transformers' registry."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from greenroom import LLM, SamplingParams
from greenroom.core.errors import UnsupportedModel
from greenroom.moe.architecture.moe_layers import blueprint, model_class
from greenroom.moe.loading.checkpoint import resolve, resolve_config
from tests.contract.families.pairs import align
from tests.contract.families.registry_families import COMPOSITE, REFUSED, SERVED, registry, save_tiny, table

DOCS = Path(__file__).resolve().parents[3] / "docs"
PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [30, 20, 10], [40, 41] * 11, [77])
NEW_TOKENS = 10


def served(folder: Path, cache: Path) -> list[tuple[int, ...]]:
    """Through the worker and its batch loop, all prompts at once, with a tenth of the experts in memory."""
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(str(folder), expert_memory="10%", kv_memory="64MiB", cache_dir=cache, progress=False) as llm:
        slots = llm.worker.experts.device
        assert slots.slots <= 0.1 * llm.worker.experts.catalogue.size
        return [completion.token_ids for completion in llm.generate(PROMPTS, sampling, progress=False)]


def generated(folder: Path) -> list[tuple[int, ...]]:
    """By transformers alone, prompt after prompt."""
    config = resolve(str(folder)).config
    model = model_class(config).from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    align(model)
    texts = []
    for prompt in PROMPTS:
        ids = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        texts.append(tuple(ids[0, len(prompt) :].tolist()))
    return texts


@pytest.mark.full
def test_the_lists_have_every_family_of_the_registry() -> None:
    """One that is new here goes into ``SERVED``, or into ``REFUSED`` with what is said of it."""
    assert registry().keys() - {*SERVED, *REFUSED} == set()


@pytest.mark.full
@pytest.mark.parametrize("family", SERVED)
def test_a_served_family_says_what_generate_says(tmp_path: Path, family: str) -> None:
    known(family)
    folder = save_tiny(family, tmp_path / "model")
    texts = served(folder, tmp_path / "cache")
    assert texts == generated(folder)
    assert len({token for text in texts for token in text}) > 2, "a model that says one thing proves little"


@pytest.mark.full
@pytest.mark.parametrize("family", [family for family, said in REFUSED.items() if said != COMPOSITE])
def test_a_refused_family_is_refused_by_name(tmp_path: Path, family: str) -> None:
    known(family)
    folder = save_tiny(family, tmp_path / "model")
    with pytest.raises(UnsupportedModel, match=f"{family}.* {REFUSED[family]}"):
        served(folder, tmp_path / "cache")


@pytest.mark.full
@pytest.mark.parametrize("family", [family for family, said in REFUSED.items() if said == COMPOSITE])
def test_a_multimodal_checkpoint_is_refused_by_name(tmp_path: Path, family: str) -> None:
    known(family)
    CONFIG_MAPPING[family]().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=f"{family}.* {REFUSED[family]}"):
        blueprint(resolve_config(str(tmp_path)).config, torch.float32)


def known(family: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip("the installed transformers does not have it")


def test_the_docs_say_what_these_tests_show() -> None:
    assert table() in (DOCS / "architecture" / "checkpoints.md").read_text()
