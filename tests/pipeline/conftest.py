"""What tests of several folders start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.text import TextProcessor
from tests import small_tokenizers
from tests.random_checkpoints import save_random


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of random weights with a tokenizer; not to be written to."""
    return save_random("olmoe", tmp_path_factory.mktemp("model") / "m", tokenizer=True)


@pytest.fixture
def pack_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its expert pack is made once for all tests, and not where the user's are."""
    monkeypatch.setenv("GREENROOM_CACHE", str(tmp_path_factory.getbasetemp() / "packs"))


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    """A small vocabulary with a chat template."""
    return TextProcessor.from_folder(small_tokenizers.write_chat(tmp_path_factory.mktemp("text")))
