from __future__ import annotations

import pytest

from tests.contract.coe.served_board import Board, make_board
from tests.quiet_transformers import no_progress_bars as no_progress_bars


@pytest.fixture(scope="session")
def board(tmp_path_factory: pytest.TempPathFactory) -> Board:
    return make_board(tmp_path_factory.getbasetemp() / "board")
