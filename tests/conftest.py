"""For all tests: tiny models compute on one thread, so that suites do not fight over cores with other processes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

# Time on the wall says nothing of an example on a busy machine; what hangs meets the timeout of its test.
settings.register_profile("greenroom", deadline=None)
settings.load_profile("greenroom")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
