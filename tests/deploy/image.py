"""The programs of deploy/image, which lie outside every package."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from tests.deploy.compose import ROOT

IMAGE = ROOT / "deploy" / "image"


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"image_{name}", IMAGE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


certificates = _module("certificates")
pins = _module("pins")
