"""A fixture for conftests: transformers shows no progress bars."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import transformers


@pytest.fixture(autouse=True, scope="session")
def no_progress_bars() -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()
