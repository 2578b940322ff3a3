from __future__ import annotations

import pytest

from tests.contract.families.pairs import Pairs
from tests.quiet_transformers import no_progress_bars as no_progress_bars


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs(tmp_path_factory.mktemp("families"))
