from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.quiet_transformers import no_progress_bars as no_progress_bars
from tests.random_checkpoints import save_random


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixtral checkpoint in shards, for tests that do not change it."""
    return save_random("mixtral", tmp_path_factory.mktemp("pristine") / "model", dtype=torch.bfloat16)


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A copy of it to spoil."""
    return Path(shutil.copytree(pristine, tmp_path / "model"))
