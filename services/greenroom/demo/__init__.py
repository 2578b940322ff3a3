"""The bundled model: the tasks it was trained on, how it was made, and where it lies."""

from __future__ import annotations

from pathlib import Path


def bundled_model_path() -> Path:
    """The folder of the bundled checkpoint, in Hugging Face's format; it comes with the package."""
    return Path(__file__).parent / "model"


def bundled_profile_path() -> Path | None:
    """What `greenroom profile` measured of it, costs apart; None where the file was taken away."""
    path = bundled_model_path() / "profile.json"
    return path if path.is_file() else None
