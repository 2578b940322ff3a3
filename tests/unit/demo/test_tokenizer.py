"""The tokenizer takes any text, and its chat template is the same under jinja2 alone and under transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from greenroom.demo.tokenizer import (
    ASSISTANT_ID,
    BOS,
    BOS_ID,
    END,
    END_ID,
    PAD,
    PAD_ID,
    USER_ID,
    render,
    save_tokenizer,
    train_tokenizer,
)
from tests.examples import examples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(700, seed=0, samples_per_task=200), path, max_length=64)
    # what transformers goes by beside the tokenizer's own files
    (path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_special_tokens_have_the_ids_that_training_counts_on(tokenizer: Tokenizer) -> None:
    expected = {PAD: PAD_ID, BOS: BOS_ID, END: END_ID, "<|user|>": USER_ID, "<|assistant|>": ASSISTANT_ID}
    assert {token: tokenizer.token_to_id(token) for token in expected} == expected


@given(text=st.text(max_size=60))
@settings(max_examples=examples(100), deadline=None)
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    # a special token's own name is the one thing that is not plain text
    if "<|" not in text:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_frequent_words_are_one_token_and_digits_alone(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(" the team 407").tokens == ["Ġthe", "Ġteam", "Ġ", "4", "0", "7"]


_CHATS = [
    [("user", "Hello!")],
    [("system", "Be polite. "), ("user", "  Who is older? \n")],
    [("user", "Hi é 🎉"), ("assistant", "Yes."), ("user", "And {{ now }}?")],
]


@pytest.mark.parametrize("turns", _CHATS)
@pytest.mark.parametrize("generation_prompt", [False, True])
def test_chat_template_is_the_same_everywhere(
    folder: Path, tokenizer: Tokenizer, turns: list[tuple[str, str]], generation_prompt: bool
) -> None:
    messages = [{"role": role, "content": content} for role, content in turns]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    alone = ImmutableSandboxedEnvironment().from_string(config["chat_template"])
    text = alone.render(messages=messages, add_generation_prompt=generation_prompt, **config)
    assert text == render(turns, generation_prompt=generation_prompt)

    library = AutoTokenizer.from_pretrained(folder)
    assert text == library.apply_chat_template(messages, add_generation_prompt=generation_prompt, tokenize=False)
    ids = library.apply_chat_template(messages, add_generation_prompt=generation_prompt, return_dict=True)["input_ids"]
    assert tokenizer.encode(text, add_special_tokens=False).ids == ids
    assert (library.bos_token_id, library.eos_token_id, library.pad_token_id) == (BOS_ID, END_ID, PAD_ID)
