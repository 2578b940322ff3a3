"""Chat templates render, and tokenizers encode, as transformers does with the same folder."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import UndefinedError

from greenroom.core.errors import CorruptCheckpoint, InvalidRequest, UnsupportedModel
from greenroom.text import ChatTemplate, TextProcessor, Tokenizer
from tests import small_tokenizers
from tests.examples import examples

SYSTEM = {"role": "system", "content": "Be brief & <kind>."}
USER = {"role": "user", "content": "  Hi 'there'\n"}
ASSISTANT = {"role": "assistant", "content": "Hello!  "}
TALKS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ASSISTANT, {"role": "user", "content": "日本 <|im_end|>"}],
    "names": [{"role": "user", "name": "Ann", "content": "x"}, {"role": "assistant", "content": None}, USER],
}
INST = """{%- if messages[0]['role'] == 'system' -%}
    {%- set system = messages[0]['content'] -%}
    {%- set talk = messages[1:] -%}
{%- else -%}
    {%- set talk = messages -%}
{%- endif -%}
{{ bos_token }}
{%- for message in talk %}
    {%- if message['role'] == 'user' %}
        {%- if loop.first and system is defined %}
            {{- '[INST] ' + system.strip() + '\n\n' + message['content'].strip() + ' [/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + ' [/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + (message['content'] or '') | trim + eos_token }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported, not ' + message['role']) }}
    {%- endif %}
{%- endfor %}
"""
HEADERS = """{% macro head(role) %}<|start|>{{ role }}
{% endmacro %}
{% set ns = namespace(turns=0, last='') %}
{{ bos_token }}{% for m in messages %}
    {% if m.role == 'system' %}{% continue %}{% endif %}
    {% set ns.turns = ns.turns + 1 %}
{{ head(m.role) }}{% if m.name is defined %}({{ m.name }}) {% endif %}
    {% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}
{{ m.content | tojson }}{% endif %}

{% endfor %}
{% if enable_thinking is defined and not enable_thinking %}<no-think>{% endif %}
{% if add_generation_prompt %}{{ head('assistant') }}{% endif %}turns={{ ns.turns }} tools={{ tools is none }}
{{ dict(a=1) | tojson(indent=2) }}{{ messages | length }}{{ '%05.1f' | format(2.5) }}
"""
DATED = "{{ strftime_now('%Y-%m') }} {{ messages | map(attribute='role') | join(',') }} {{ range(3) | list }}"
TEMPLATES = {"chatml": small_tokenizers.CHATML, "inst": INST, "headers": HEADERS, "dated": DATED}


def processors(folder: Path, template: str) -> tuple[TextProcessor, Any]:
    """Ours and that of transformers."""
    from transformers import AutoTokenizer

    small_tokenizers.write_chat(folder, template=template)
    return TextProcessor.from_folder(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_equals_transformers(tmp_path: Path, template: str) -> None:
    ours, theirs = processors(tmp_path, TEMPLATES[template])
    for name, talk in TALKS.items():
        if (template, name) == ("chatml", "names"):  # it adds up strings, and one message has no content
            with pytest.raises(UndefinedError):
                theirs.apply_chat_template(talk, tokenize=False)
            with pytest.raises(InvalidRequest, match="'dict object' has no attribute 'content'"):
                ours.chat.render(talk)
            continue
        for prompt in (True, False):
            for variables in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
                expected = theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=prompt, **variables)
                text = ours.chat.render(talk, add_generation_prompt=prompt, variables=variables)
                assert text == expected
                ids = ours.tokenizer.encode(text, add_special_tokens=False)
                assert ids == theirs.apply_chat_template(
                    talk, add_generation_prompt=prompt, return_dict=False, **variables
                )


@pytest.mark.parametrize("template", ["chatml", "inst"])
@pytest.mark.parametrize("final", ["The answer", "The answer  ", "x"])
def test_continuing_the_final_message_equals_transformers(tmp_path: Path, template: str, final: str) -> None:
    ours, theirs = processors(tmp_path, TEMPLATES[template])
    talk = [USER, {"role": "assistant", "content": final}]
    expected = theirs.apply_chat_template(talk, tokenize=False, continue_final_message=True)
    assert ours.chat.render(talk, add_generation_prompt=False, continue_final_message=True) == expected


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
@settings(max_examples=examples(60), deadline=None)
@given(text=st.text(max_size=30), special=st.booleans())
def test_encoding_equals_transformers(
    kind: str, text: str, special: bool, both: dict[str, tuple[Tokenizer, Any]]
) -> None:
    ours, theirs = both[kind]
    ids = ours.encode(text, add_special_tokens=special)
    assert ids == theirs(text, add_special_tokens=special)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Any]]:
    from transformers import AutoTokenizer

    made = {}
    for kind in ("byte_level", "byte_fallback", "metaspace"):
        folder = small_tokenizers.write(tmp_path_factory.mktemp(kind), small_tokenizers.ALL[kind]())
        made[kind] = (Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder))
    return made


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": "</s>", "additional_special_tokens": ["<tool>", "<new>"]},
        {"bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False}, "pad_token": "<pad>"},
        {"added_tokens_decoder": {"402": {"content": "<late>", "special": False}}, "eos_token": "</s>"},
        {"eos_token": "<tool>"},
        {"extra_special_tokens": {"image_token": "<image>"}, "unk_token": "hello"},
    ],
)
def test_special_tokens_of_the_config_equal_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    folder = small_tokenizers.write(tmp_path, small_tokenizers.byte_level(), **config)
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    text = "<s>a<tool>b<new>c</s><pad>d<late>e<image>hello"
    ids = ours.encode(text, add_special_tokens=True)
    assert ids == theirs(text)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.named_tokens == theirs.special_tokens_map


def test_truncation_and_padding_that_training_left_behind_are_off(tmp_path: Path) -> None:
    tokenizer = small_tokenizers.byte_level()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    plain = small_tokenizers.byte_level().encode("hello there, hello there").ids
    folder = small_tokenizers.write(tmp_path, tokenizer)
    assert Tokenizer.from_folder(folder).encode("hello there, hello there", add_special_tokens=True) == plain


def test_special_tokens_map_is_read_where_the_config_says_nothing(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = small_tokenizers.write(tmp_path, small_tokenizers.byte_level())
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}, "bos_token": "<s>"}')
    assert Tokenizer.from_folder(folder).named_tokens == AutoTokenizer.from_pretrained(folder).special_tokens_map


def test_the_template_file_goes_before_the_config(tmp_path: Path) -> None:
    folder = small_tokenizers.write_chat(tmp_path)
    (folder / "chat_template.jinja").write_text("from the file", encoding="utf-8")
    assert TextProcessor.from_folder(folder).chat.render([USER]) == "from the file"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    folder = small_tokenizers.write(tmp_path, small_tokenizers.byte_level(), chat_template=named)
    assert TextProcessor.from_folder(folder).chat.render([USER]) == "plain"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "has no chat template"),
        ("{% if %}", "not valid Jinja"),
        ([{"name": "rag", "template": "x"}], "none of them is named default .they are: rag"),
    ],
)
def test_without_a_usable_template_chat_says_what_to_do(tmp_path: Path, template: Any, reason: str) -> None:
    folder = small_tokenizers.write(tmp_path, small_tokenizers.byte_level(), chat_template=template)
    text = TextProcessor.from_folder(folder)
    assert not text.has_chat
    with pytest.raises(InvalidRequest, match=f"{reason}.*use /v1/completions, or put a chat_template.jinja") as caught:
        _ = text.chat
    assert caught.value.code == "no_chat_template"
    assert text.tokenizer.encode("hello", add_special_tokens=False)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(_x=1) %}",
        "{{ dict.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ raise_exception.__globals__.jinja2 }}",
        "{{ range(1000000000) | list }}",
        "{{ messages[5].content.x }}",
        "{{ 1 + 'a' }}",
        "{{ raise_exception('no such talk') }}",
    ],
)
def test_what_the_sandbox_or_the_template_refuses_is_the_requests_fault(template: str) -> None:
    with pytest.raises(InvalidRequest, match="the model's chat template") as caught:
        ChatTemplate(template, {}).render([dict(USER)])
    assert caught.value.param == "messages"


def test_variables_are_what_a_caller_can_set() -> None:
    assert ChatTemplate(HEADERS, {"bos_token": "<s>", "eos_token": "</s>"}).variables == {"enable_thinking"}
    assert ChatTemplate(DATED, {}).variables == set()


def test_the_date_is_todays() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render([USER]) == str(datetime.now().year)


def test_a_message_that_is_left_out_can_not_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="leaves out the final message"):
        ChatTemplate("{{ messages[0].content }}", {}).render(
            [USER, ASSISTANT], add_generation_prompt=False, continue_final_message=True
        )


@pytest.mark.parametrize("name", ["tokenizer.model", "tiktoken.model"])
def test_a_vocabulary_to_convert_is_refused_with_the_way_to_do_it(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x0a")
    with pytest.raises(UnsupportedModel, match=f"has {name} but no tokenizer.json.*save_pretrained"):
        TextProcessor.from_folder(tmp_path)


def test_a_pointer_of_git_lfs_says_how_to_get_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n")
    with pytest.raises(CorruptCheckpoint, match=r"tokenizer\.json is no tokenizer: .*`git lfs pull`"):
        TextProcessor.from_folder(tmp_path)


def test_a_folder_without_any_tokenizer_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"no tokenizer\.json"):
        TextProcessor.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"model": {"type": "no such"}}'),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", "\xff"),
        ("tokenizer_config.json", json.dumps({"chat_template": 3})),
        ("tokenizer_config.json", json.dumps({"eos_token": 3})),
        ("tokenizer_config.json", json.dumps({"added_tokens_decoder": {"x": {"content": "a"}}})),
        ("tokenizer_config.json", json.dumps({"added_tokens_decoder": [1]})),
        ("tokenizer_config.json", json.dumps({"additional_special_tokens": 7})),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: str) -> None:
    folder = small_tokenizers.write_chat(tmp_path)
    (folder / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(CorruptCheckpoint, match=name):
        TextProcessor.from_folder(folder)


def test_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(small_tokenizers.write_chat(tmp_path))
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        tokenizer.encode("a\ud800b", add_special_tokens=False)
