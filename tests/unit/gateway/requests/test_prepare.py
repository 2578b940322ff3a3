"""From bodies to sequences: what reaches the template, the tokenizer and the sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greenroom.core.errors import InvalidRequest
from greenroom.core.generation import MAX_SEED, GenerationRequest, SamplingParams, ServedModel, Slo
from greenroom.gateway.config import GatewayConfig
from greenroom.gateway.doors.doorkeeper import Caller
from greenroom.gateway.doors.keys import KeyLimits
from greenroom.gateway.replies.echo import Echo
from greenroom.gateway.requests.bodies import ChatBody, CompletionBody
from greenroom.gateway.requests.call_headers import CallHeaders
from greenroom.gateway.requests.prepare import Prepared, prepare_chat, prepare_completion
from greenroom.gateway.requests.prompts import MAX_WORDS
from greenroom.gateway.requests.token_limits import Length, within_limits
from greenroom.text import TextProcessor
from greenroom.text.sampling_defaults import SamplingDefaults
from tests import small_tokenizers

MODEL = ServedModel("m", max_model_len=128, vocab_size=600, eos_token_ids=(4,), created=0)
RICH = (
    "{{ bos_token }}{% if effort is defined %}[{{ effort }}]{% endif %}"
    "{% if reasoning_effort is defined %}({{ reasoning_effort }}){% endif %}"
    "{% for m in messages %}{% if m.role == 'developer' %}DEV{% endif %}{{ m.role }}"
    "{% if m.name is defined %}/{{ m.name }}{% endif %}: {{ m.content }}{% if not loop.last %}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}\nassistant: {% endif %}"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    return TextProcessor.from_folder(small_tokenizers.write_chat(tmp_path_factory.mktemp("chatml")))


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    return TextProcessor.from_folder(small_tokenizers.write_chat(tmp_path_factory.mktemp("rich"), template=RICH))


@pytest.fixture(scope="module")
def llama_like(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    tokenizer = small_tokenizers.byte_fallback()
    return TextProcessor.from_folder(small_tokenizers.write_chat(tmp_path_factory.mktemp("llama"), tokenizer))


CONFIG = GatewayConfig(max_choices=8)
TERMS = CallHeaders(base="r")


def chat(
    text: TextProcessor,
    messages: list[dict[str, Any]],
    model: ServedModel = MODEL,
    call: CallHeaders = TERMS,
    config: GatewayConfig = CONFIG,
    **fields: Any,
) -> Prepared:
    body = msgspec.convert({"model": "m", "messages": messages, **fields}, ChatBody)
    return prepare_chat(body, text, model, call=call, config=config)


def complete(
    text: TextProcessor,
    prompt: Any,
    model: ServedModel = MODEL,
    call: CallHeaders = TERMS,
    config: GatewayConfig = CONFIG,
    **fields: Any,
) -> Prepared:
    body = msgspec.convert({"model": "m", "prompt": prompt, **fields}, CompletionBody)
    return prepare_completion(body, text, model, call=call, config=config)


def only(prepared: Prepared) -> GenerationRequest:
    [job] = prepared.jobs
    return job.request


def shown(text: TextProcessor, prepared: Prepared) -> str:
    ids = prepared.jobs[0].request.prompt_ids
    return str(text.tokenizer._backend.decode(list(ids), skip_special_tokens=False))


def user(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def test_sampling_says_what_the_body_says(text: TextProcessor) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0, "top_k": -1, "min_p": 0.25, "presence_penalty": -1, "frequency_penalty": 0.5,
        "repetition_penalty": 1.25, "logit_bias": {"9": -100, "3": 2.5}, "min_tokens": 2, "max_tokens": 5,
    }  # fmt: skip
    for prepared in (chat(text, [user()], **fields), complete(text, "hi", **fields)):
        assert only(prepared).sampling == SamplingParams(
            temperature=0.5, top_p=0.0, top_k=0, min_p=0.25, presence_penalty=-1, frequency_penalty=0.5,
            repetition_penalty=1.25, logit_bias=((3, 2.5), (9, -100.0)), min_tokens=2, max_tokens=5,
        )  # fmt: skip


def test_what_the_body_does_not_say_is_the_checkpoints(text: TextProcessor) -> None:
    defaults = SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, min_p=0.1, repetition_penalty=1.05)
    body = CompletionBody(model="m", prompt="hi")
    sampling = only(prepare_completion(body, text, MODEL, call=TERMS, config=CONFIG, defaults=defaults)).sampling
    said = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.repetition_penalty)
    assert said == (0.7, 0.8, 20, 0.1, 1.05)
    for top_k in (0, -1):
        body = CompletionBody(
            model="m", prompt="hi", temperature=0, top_p=1, top_k=top_k, min_p=0, repetition_penalty=1
        )
        prepared = prepare_completion(body, text, MODEL, call=TERMS, config=CONFIG, defaults=defaults)
        assert only(prepared).sampling == SamplingParams(temperature=0, max_tokens=16)


def test_top_logprobs_of_none_need_no_logprobs(text: TextProcessor) -> None:
    assert only(chat(text, [user()], top_logprobs=0)).sampling.logprobs is None
    assert only(chat(text, [user()], logprobs=False, top_logprobs=0)).sampling.logprobs is None


@pytest.mark.parametrize("ids", [[-1], [10**6], [2**63 - 1], [7, -(2**63)], [7] * 129])
@pytest.mark.parametrize("fields", [{"echo": True}, {"echo": True, "logprobs": 1, "max_tokens": 0}])
def test_ids_are_checked_before_they_are_told(text: TextProcessor, ids: list[int], fields: dict[str, Any]) -> None:
    for prompt in (ids, [[7], ids]):
        with pytest.raises(InvalidRequest) as caught:
            complete(text, prompt, **fields)
        assert caught.value.param == "prompt"


def test_no_tokens_at_all_may_be_asked_for(text: TextProcessor) -> None:
    assert only(chat(text, [user()], max_tokens=0)).sampling.max_tokens == 0
    assert only(chat(text, [user()], max_completion_tokens=0)).sampling.max_tokens == 0
    assert only(complete(text, "hi", max_tokens=0)).sampling.max_tokens == 0
    whole_context = complete(text, [7] * MODEL.max_model_len, max_tokens=0)
    assert len(only(whole_context).prompt_ids) == MODEL.max_model_len
    with pytest.raises(InvalidRequest, match="context length"):
        complete(text, [7] * (MODEL.max_model_len + 1), max_tokens=0)


def test_echo_asks_for_the_prompts_log_probabilities_where_there_are_others(text: TextProcessor) -> None:
    for logprobs in (None, 3, 0):
        [job] = complete(text, "hello there", echo=True, logprobs=logprobs).jobs
        assert job.request.sampling.prompt_logprobs == job.request.sampling.logprobs == logprobs
        assert job.echo is not None
        assert job.echo.text == "hello there"
    [job] = complete(text, "hello there", echo=False, logprobs=3).jobs
    assert (job.echo, job.request.sampling.prompt_logprobs) == (None, None)


def test_the_same_key_with_another_echo_is_another_request(text: TextProcessor) -> None:
    call = CallHeaders(base="r", keyed=True)
    plain, echoed = (only(complete(text, "hi", call=call, echo=echo)).digest for echo in (False, True))
    assert plain != echoed


@given(words=st.text(max_size=30))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_offsets_of_an_echoed_prompt_are_places_in_it(
    text: TextProcessor, llama_like: TextProcessor, words: str
) -> None:
    for processor in (text, llama_like):
        tokenizer = processor.tokenizer
        for special in (True, False):
            ids = tokenizer.encode(words, add_special_tokens=special)
            echo = Echo.of_text(words, ids, tokenizer, add_special_tokens=special)
            assert list(echo.offsets) == sorted(echo.offsets)
            assert len(echo.offsets) == len(ids)
            assert all(0 <= offset <= len(words) for offset in echo.offsets)
            decoded = Echo.of_tokens(ids, tokenizer)
            assert decoded.text == tokenizer.decode(ids)
            assert list(decoded.offsets) == sorted(decoded.offsets)


@given(pieces=st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "<tool>", "hi", " ", "\n", "é", "日本", "🚀"])))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_token_of_an_echoed_prompt_stands_at_its_offset(text: TextProcessor, pieces: list[str]) -> None:
    """Special tokens that are written in the prompt too. Of a character that several tokens make each stands at it."""
    words, tokenizer = "".join(pieces), text.tokenizer
    ids = tokenizer.encode(words, add_special_tokens=True)
    echo = Echo.of_text(words, ids, tokenizer, add_special_tokens=True)
    whole = words.encode()
    begin = 0
    for offset, token_id in zip(echo.offsets, ids, strict=True):
        assert offset == len(whole[:begin].decode(errors="ignore"))
        begin += len(tokenizer.token_bytes(token_id))
    assert begin == len(whole)


def test_what_the_tokenizer_puts_around_a_prompt_takes_no_room_in_it(llama_like: TextProcessor) -> None:
    tokenizer = llama_like.tokenizer
    for words, first, last in (("<s>", (0, 0), 0), ("hi", (0, 0), 1), ("<s>hi</s>", (0, 0, 3), 5)):
        ids = tokenizer.encode(words, add_special_tokens=True)
        echo = Echo.of_text(words, ids, tokenizer, add_special_tokens=True)
        assert ids[0] == tokenizer.token_id("<s>")
        assert (echo.offsets[: len(first)], echo.offsets[-1]) == (first, last)


def test_special_tokens_that_were_written_out_take_their_place_in_the_offsets(text: TextProcessor) -> None:
    pieces = ["<|im_start|>", "user", "\n", "hi", "<|im_end|>", " there"]
    words = "".join(pieces)
    ids = text.tokenizer.encode(words, add_special_tokens=True)
    echo = Echo.of_text(words, ids, text.tokenizer, add_special_tokens=True)
    named = [place for place, token_id in enumerate(ids) if text.tokenizer.visible_token(token_id) is None]
    assert [echo.offsets[place] for place in named] == [0, words.index("<|im_end|>")]
    told = [words[start:stop] for start, stop in zip(echo.offsets, (*echo.offsets[1:], len(words)), strict=True)]
    assert told == [text.tokenizer.decode([token_id], special=True) for token_id in ids]


TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
READS_TOOLS = (
    "{% if tools %}{% for t in tools %}[{{ t.function.name }}]{% endfor %}{% endif %}" + small_tokenizers.CHATML
)


def test_tools_go_to_templates_that_read_them(text: TextProcessor, tmp_path: Path) -> None:
    reading = TextProcessor.from_folder(small_tokenizers.write_chat(tmp_path, template=READS_TOOLS))
    told = chat(reading, [user()], tools=TOOLS, tool_choice="none")
    assert shown(reading, told).startswith("[look_up]<|im_start|>user")
    assert shown(reading, chat(reading, [user()], tools=[])) == shown(reading, chat(reading, [user()]))
    with pytest.raises(InvalidRequest, match="tools is not supported: the model's chat template") as caught:
        chat(text, [user()], tools=TOOLS, tool_choice="none")
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_field")


def test_parts_of_text_are_joined_by_lines(text: TextProcessor) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "<|im_start|>user\none\ntwo<|im_end|>" in shown(text, chat(text, [user(parts)]))


def test_developer_is_system_where_the_template_does_not_know_it(text: TextProcessor, rich: TextProcessor) -> None:
    messages = [{"role": "developer", "content": "be brief"}, user()]
    assert shown(text, chat(text, messages)).startswith("<|im_start|>system\nbe brief")
    assert "DEVdeveloper: be brief" in shown(rich, chat(rich, messages))


def test_names_go_to_templates_that_use_them(text: TextProcessor, rich: TextProcessor) -> None:
    assert "user/Ann: hi" in shown(rich, chat(rich, [user(name="Ann")]))
    with pytest.raises(InvalidRequest, match=r"messages\[1\]\.name is not supported"):
        chat(text, [user(), user(name="Ann")])


def test_template_variables(rich: TextProcessor) -> None:
    prepared = chat(rich, [user()], chat_template_kwargs={"effort": "much"}, reasoning_effort="low")
    assert shown(rich, prepared).startswith("<s>[much](low)user: hi")
    for name in ("bos_token", "messages", "add_generation_prompt", "loop", "other"):
        with pytest.raises(InvalidRequest, match=f"{name}: .*known: effort, reasoning_effort"):
            chat(rich, [user()], chat_template_kwargs={name: "x"})


def test_generation_prompt_and_continuation(text: TextProcessor, llama_like: TextProcessor) -> None:
    start = "<|im_start|>assistant\n"
    assert shown(text, chat(text, [user()])).endswith(start)
    assert not shown(text, chat(text, [user()], add_generation_prompt=False)).endswith(start)
    talk = [user(), {"role": "assistant", "content": "I say"}]
    continued = chat(text, talk, continue_final_message=True)
    assert shown(text, continued).endswith(start + "I say")
    assert continued.jobs[0].behind_text
    assert not chat(llama_like, [user()]).jobs[0].behind_text
    assert complete(llama_like, "hi").jobs[0].behind_text


def test_special_tokens_around_prompts(llama_like: TextProcessor) -> None:
    bos = llama_like.tokenizer.token_id("<s>")
    assert complete(llama_like, "hi").jobs[0].request.prompt_ids[0] == bos
    assert complete(llama_like, "hi", add_special_tokens=False).jobs[0].request.prompt_ids[0] != bos
    assert chat(llama_like, [user()]).jobs[0].request.prompt_ids[0] != bos
    assert chat(llama_like, [user()], add_special_tokens=True).jobs[0].request.prompt_ids[0] == bos


def test_defaults(text: TextProcessor) -> None:
    [job] = chat(text, [user()]).jobs
    sampling = job.request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (1.0, 1.0, 0, None)
    assert (sampling.stop, sampling.stop_token_ids, sampling.ignore_eos, sampling.logprobs) == ((), (), False, None)
    assert sampling.max_tokens == MODEL.max_model_len - len(job.request.prompt_ids)
    assert complete(text, [7] * 100).jobs[0].request.sampling.max_tokens == 16
    assert chat(text, [user()], top_k=-1).jobs[0].request.sampling.top_k == 0


def test_the_context_may_be_filled_to_its_end_and_not_beyond(text: TextProcessor) -> None:
    assert complete(text, [7] * 127).jobs[0].request.sampling.max_tokens == 1
    assert complete(text, [7] * 100, max_tokens=28).jobs[0].request.sampling.max_tokens == 28
    with pytest.raises(InvalidRequest, match="128 tokens, but 100 in the prompt and 29 to generate") as caught:
        complete(text, [7] * 100, max_tokens=29)
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
    with pytest.raises(InvalidRequest, match="128 in the prompt and at least 1 to generate") as caught:
        complete(text, [7] * 128)
    assert caught.value.param == "prompt"


def test_one_long_prompt_of_several_refuses_all(text: TextProcessor) -> None:
    with pytest.raises(InvalidRequest, match="128 in the prompt"):
        complete(text, [[7], [7] * 128])


def test_seeds_of_choices(text: TextProcessor) -> None:
    seeds = [job.request.sampling.seed for job in complete(text, ["a", "b"], n=3, seed=9).jobs]
    assert seeds[:3] == seeds[3:]  # a prompt gives the same alone and among others
    assert seeds[0] == 9
    assert len(set(seeds)) == 3
    assert all(seed is not None and 0 <= seed <= MAX_SEED for seed in seeds)
    assert [job.request.sampling.seed for job in complete(text, "a", n=2).jobs] == [None, None]


def test_ids_and_places(text: TextProcessor) -> None:
    prepared = complete(text, ["a", "b"], n=2, task_type="compare")
    assert [job.index for job in prepared.jobs] == [0, 1, 2, 3]
    assert [job.request.request_id for job in prepared.jobs] == ["r-0", "r-1", "r-2", "r-3"]
    assert {job.request.task_type for job in prepared.jobs} == {"compare"}
    assert prepared.prompt_tokens == 2


def test_top_logprobs_is_named_by_its_own_field(text: TextProcessor) -> None:
    assert chat(text, [user()], logprobs=True).jobs[0].request.sampling.logprobs == 0
    assert chat(text, [user()], logprobs=True, top_logprobs=20).jobs[0].request.sampling.logprobs == 20
    with pytest.raises(InvalidRequest, match=r"^top_logprobs must be from 0 to 20") as caught:
        chat(text, [user()], logprobs=True, top_logprobs=-1)
    assert caught.value.param == "top_logprobs"


def test_text_whose_tokens_the_model_does_not_have(text: TextProcessor) -> None:
    small = ServedModel("m", 128, vocab_size=10, eos_token_ids=(4,), created=0)
    with pytest.raises(InvalidRequest, match="the model's are 0 to 9"):
        complete(text, "hello", small)


def test_the_words_that_tell_the_task(text: TextProcessor) -> None:
    talk = [user("first"), {"role": "assistant", "content": "so?"}, user("Summarise this.")]
    talk += [{"role": "system", "content": "x"}]
    assert only(chat(text, talk)).prompt == "Summarise this."
    assert only(chat(text, [{"role": "system", "content": "Be brief."}])).prompt == "Be brief."
    assert only(complete(text, "Sort: 3 1 2")).prompt == "Sort: 3 1 2"
    ids = text.tokenizer.encode("hello there", add_special_tokens=False)
    assert only(complete(text, ids)).prompt == "hello there"


def test_words_are_decoded_once_for_each_prompt(text: TextProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[tuple[int, ...]] = []
    decode = text.tokenizer.decode

    def counted(ids: Any) -> str:
        decoded.append(tuple(ids))
        return decode(ids)

    monkeypatch.setattr(text.tokenizer, "decode", counted)
    both = [text.tokenizer.encode(said, add_special_tokens=False) for said in ("hello there", "so long")]
    jobs = complete(text, both, n=3).jobs
    assert [job.request.prompt for job in jobs] == ["hello there"] * 3 + ["so long"] * 3
    assert decoded == [tuple(ids) for ids in both]


def test_of_a_long_prompt_both_ends_tell_the_task(text: TextProcessor) -> None:
    roomy = ServedModel("m", max_model_len=100_000, vocab_size=600, eos_token_ids=(4,), created=0)
    words = only(complete(text, "Translate: " + "la " * 4000 + "Thank you.", roomy)).prompt
    assert len(words) <= MAX_WORDS + 1
    assert words.startswith("Translate: ")
    assert words.endswith("Thank you.")
    ids = text.tokenizer.encode("Sort! " + "la " * 4000 + "Now.", add_special_tokens=False)
    words = only(complete(text, ids, roomy)).prompt
    assert (words[:5], words[-4:], len(words) <= MAX_WORDS + 1) == ("Sort!", "Now.", True)


def test_hopes_come_from_body_or_headers(text: TextProcessor) -> None:
    said = CallHeaders(base="r", slo=Slo(ttft_ms=200, e2e_ms=900), priority=7)
    request = only(complete(text, "a", call=said, slo={"tpot_ms": 50, "e2e_ms": 900}))
    assert (request.slo, request.priority) == (Slo(ttft_ms=200, tpot_ms=50, e2e_ms=900), 7)
    assert only(complete(text, "a", priority=-100)).priority == -100
    assert only(complete(text, "a", call=said, priority=7)).priority == 7
    assert (only(complete(text, "a")).slo, only(complete(text, "a")).priority) == (Slo(), 0)


def test_body_and_headers_that_differ_are_refused(text: TextProcessor) -> None:
    said = CallHeaders(base="r", slo=Slo(ttft_ms=200), priority=7)
    with pytest.raises(InvalidRequest, match=r"slo\.ttft_ms and the header x-slo-ttft-ms differ"):
        complete(text, "a", call=said, slo={"ttft_ms": 201})
    with pytest.raises(InvalidRequest, match="priority and the header x-priority differ"):
        complete(text, "a", call=said, priority=0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"priority": 101}, "priority"),
        ({"priority": -101}, "priority"),
        ({"slo": {"ttft_ms": 0}}, "slo"),
        ({"slo": {"e2e_ms": -5}}, "slo"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": 3600.5}, "timeout"),
    ],
)
def test_hopes_out_of_range(text: TextProcessor, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        complete(text, "a", **fields)
    assert caught.value.param == param


def test_timeouts(text: TextProcessor) -> None:
    assert complete(text, "a").timeout_s == only(complete(text, "a")).timeout_s == 600
    assert only(complete(text, "a", timeout=0.25)).timeout_s == 0.25
    hurried = CallHeaders(base="r", patience_s=3.0)
    assert only(complete(text, "a", call=hurried)).timeout_s == 3.0
    assert only(complete(text, "a", call=hurried, timeout=2)).timeout_s == 2


def test_limits_of_tokens(text: TextProcessor) -> None:
    tight = GatewayConfig(max_prompt_tokens=10, max_new_tokens=20)
    assert only(chat(text, [user()], config=GatewayConfig(max_new_tokens=20))).sampling.max_tokens == 20
    assert only(complete(text, [7] * 10, config=tight, max_tokens=20)).sampling.max_tokens == 20
    cases: list[tuple[dict[str, Any], list[int], str]] = [
        ({}, [7] * 11, "prompt"),
        ({"max_tokens": 21}, [7], "max_tokens"),
    ]
    for fields, prompt, param in cases:
        with pytest.raises(InvalidRequest) as caught:
            complete(text, prompt, config=tight, **fields)
        assert (caught.value.param, caught.value.code) == (param, "token_limit_exceeded")


def test_a_key_has_a_limit_of_tokens(text: TextProcessor) -> None:
    limited = CallHeaders(base="r", caller=Caller("ann", KeyLimits(token_limit=30)))
    said = complete(text, [[7] * 5, [7] * 5], call=limited, n=2, max_tokens=5)
    assert [job.request.sampling.max_tokens for job in said.jobs] == [5] * 4
    lowered = complete(text, [[7] * 5, [7] * 5], call=limited, n=2)
    assert [job.request.sampling.max_tokens for job in lowered.jobs] == [5] * 4
    cases: list[tuple[dict[str, Any], list[int], str]] = [
        ({"max_tokens": 21}, [7] * 10, "max_tokens"),
        ({}, [7] * 30, "prompt"),
    ]
    for fields, prompt, param in cases:
        with pytest.raises(InvalidRequest, match="this key is allowed 30") as caught:
            complete(text, prompt, call=limited, **fields)
        assert (caught.value.param, caught.value.code) == (param, "token_limit_exceeded")


KEYED = CallHeaders(base="r", caller=Caller("ann"), keyed=True)


def test_the_digest_is_of_what_is_asked(text: TextProcessor) -> None:
    def digest(**fields: Any) -> bytes:
        request = only(complete(text, fields.pop("prompt", "a"), call=fields.pop("call", KEYED), **fields))
        assert (request.keyed, request.tenant) == (True, "ann")
        return request.digest

    same = digest()
    assert len(same) == 32
    assert digest(stream=True, stream_options={"include_usage": True}) == same
    assert digest(user="bob", timeout=5) == same
    assert digest(prompt=text.tokenizer.encode("a", add_special_tokens=True)) == same
    assert digest(temperature=1.0, top_k=0, max_tokens=16) == same
    others = [
        digest(prompt="b"), digest(temperature=0.5), digest(seed=1), digest(max_tokens=17), digest(stop="x"),
        digest(task_type="sort"), digest(priority=1), digest(slo={"ttft_ms": 1}), digest(logprobs=0),
        digest(include_stop_str_in_output=True), digest(ignore_eos=True), digest(top_k=3),
    ]  # fmt: skip
    assert len({same, *others}) == len(others) + 1
    assert only(complete(text, "a")).digest == b""


@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    n=st.integers(1, 3),
    said=st.none() | st.integers(1, 60),
    most=st.none() | st.integers(1, 80),
    key=st.none() | st.integers(2, 200),
)
def test_no_request_gets_more_tokens_than_allowed(
    prompts: list[int], n: int, said: int | None, most: int | None, key: int | None
) -> None:
    """Nor fewer than it said, nor needlessly few where it said nothing."""
    room = [100 - prompt for prompt in prompts]
    wished = room if said is None else [said] * len(prompts)
    length = Length(said, "max_tokens", said=said is not None)
    limits = KeyLimits(token_limit=key)
    fits = (most is None or max(wished) <= most) and (key is None or sum(prompts) + n * sum(wished) <= key)
    config = GatewayConfig(max_new_tokens=most)
    least = said or 1
    impossible = key is not None and sum(prompts) + n * len(prompts) * least > key
    if impossible or (said is not None and not fits):
        with pytest.raises(InvalidRequest) as caught:
            within_limits(prompts, n, wished, length, "prompt", config, limits)
        assert caught.value.code == "token_limit_exceeded"
        return
    given_tokens = within_limits(prompts, n, wished, length, "prompt", config, limits)
    assert all(1 <= each <= wish for each, wish in zip(given_tokens, wished, strict=True))
    assert most is None or max(given_tokens) <= most
    assert key is None or sum(prompts) + n * sum(given_tokens) <= key
    assert said is None or given_tokens == wished
    assert not fits or given_tokens == wished


def _encodes_nothing(text: TextProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*args: Any, **how: Any) -> list[int]:
        raise AssertionError("it is too long by its length alone")

    monkeypatch.setattr(text.tokenizer, "encode", encode)


def test_what_is_too_long_by_its_length_is_refused_without_being_encoded(
    text: TextProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    _encodes_nothing(text, monkeypatch)
    long = "lorem ipsum " * 10_000
    with pytest.raises(InvalidRequest, match="maximum context length is 128 tokens") as refused:
        chat(text, [{"role": "user", "content": long}])
    assert (refused.value.param, refused.value.code) == ("messages", "context_length_exceeded")
    for prompt in (long, [long, "x"]):
        with pytest.raises(InvalidRequest, match="shorten the prompt") as refused:
            complete(text, prompt)
        assert (refused.value.param, refused.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(InvalidRequest, match="at most 100 are allowed here") as refused:
        complete(text, long, config=GatewayConfig(max_choices=8, max_prompt_tokens=100))
    assert refused.value.code == "token_limit_exceeded"
