"""The forms of what foretells paths from tokens, each with the check of its arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy.typing as npt

from greenroom.core.artifacts.paths_forms.t5 import T5, check_t5
from greenroom.core.artifacts.paths_forms.tables import TABLES, check_tables

CheckTensors = Callable[[Mapping[str, npt.NDArray[Any]], tuple[int, ...], int], None]
"""Of the tensors, the experts of each layer and the vocabulary. Raises InvalidConfig, naming the tensor."""

FORMS: Final[Mapping[str, CheckTensors]] = {TABLES: check_tables, T5: check_t5}
"""A further form is a file beside ``tables`` and a line here."""
