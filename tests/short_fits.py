"""Fits that learn less than users get, where a test is of what is around them."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest


def fit_with(patch: pytest.MonkeyPatch, module: ModuleType, **changes: int) -> None:
    """From now on ``module.fit``, whose last argument are its ``FitOptions``, if any, has these ``changes`` to them."""
    whole = module.fit

    def fit(*arguments: Any, **more: Any) -> Any:
        *given, last = arguments
        if not isinstance(last, module.FitOptions):
            given, last = [*arguments], module.FitOptions()
        return whole(*given, replace(last, **changes), **more)

    patch.setattr(module, "fit", fit)
