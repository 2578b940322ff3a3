"""What generation_config.json says of sampling."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.core.errors import CorruptCheckpoint
from greenroom.demo import bundled_model_path
from greenroom.text import TextProcessor
from greenroom.text.sampling_defaults import NO_DEFAULTS, SamplingDefaults, read_sampling_defaults
from tests import small_tokenizers

QWEN = """{"bos_token_id": 151643, "do_sample": true, "eos_token_id": [151645, 151643], "repetition_penalty": 1.05,
"temperature": 0.7, "top_k": 20, "top_p": 0.8, "max_new_tokens": 2048, "transformers_version": "4.51.0"}"""


def written(folder: Path, text: str) -> Path:
    (folder / "generation_config.json").write_text(text)
    return folder


def test_what_is_said_is_taken(tmp_path: Path) -> None:
    wanted = SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)
    assert read_sampling_defaults(written(tmp_path, QWEN)) == wanted
    assert read_sampling_defaults(written(tmp_path, '{"top_k": -1}')) == SamplingDefaults(top_k=0), "off, as in vLLM"
    assert read_sampling_defaults(written(tmp_path, QWEN)) == wanted
    small_tokenizers.write_chat(tmp_path)
    assert TextProcessor.from_folder(tmp_path).sampling_defaults() == wanted


def test_what_is_not_said_is_not_there(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == NO_DEFAULTS
    assert read_sampling_defaults(written(tmp_path, '{"temperature": null, "do_sample": false}')) == NO_DEFAULTS
    assert read_sampling_defaults(Path(bundled_model_path())) == NO_DEFAULTS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "can not be read"),
        ("[]", "can not be read"),
        ('{"temperature": "hot"}', "temperature"),
        ('{"temperature": 7.5}', "temperature must be from 0 to 2"),
        ('{"top_p": 1.5}', "top_p must be"),
        ('{"repetition_penalty": 0}', "repetition_penalty must be above 0"),
    ],
)
def test_what_no_request_may_have_is_refused_with_the_way_out(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=said) as caught:
        read_sampling_defaults(written(tmp_path, text))
    assert "--generation-config none" in str(caught.value)
