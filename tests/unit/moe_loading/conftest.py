from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from tests.random_checkpoints import save_random


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixtral checkpoint in shards that nobody changes."""
    return save_random("mixtral", tmp_path_factory.mktemp("pristine") / "model", dtype=torch.bfloat16)


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A copy of it to spoil."""
    return Path(shutil.copytree(pristine, tmp_path / "model"))
