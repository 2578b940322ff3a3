"""The small tokenizers as checkpoints' folders load them, each once."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from greenroom.text import Tokenizer
from tests import small_tokenizers


@cache
def load(kind: str) -> Tokenizer:
    with TemporaryDirectory() as folder:
        return Tokenizer.from_folder(small_tokenizers.write(Path(folder), small_tokenizers.ALL[kind]()))
