"""For all tests: tiny models compute on one thread, so that suites do not fight over cores with other processes."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
