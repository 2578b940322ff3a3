"""What a model's text is made by, wherever it lies: in a checkpoint's folder, or in a GGUF file."""

from __future__ import annotations

from pathlib import Path

from greenroom.text.files import TextFiles, read_text_files
from greenroom.text.gguf_tokenizer import gguf_text_files


def text_files_of(place: Path) -> TextFiles:
    """Of the folder or the GGUF file ``place``. Raises CorruptCheckpoint, UnsupportedModel."""
    return gguf_text_files(place) if place.is_file() else read_text_files(place)
