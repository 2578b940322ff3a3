"""Every decoder-only family, ragged, says what transformers' own generate says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

from greenroom.core.errors import InvalidConfig, UnsupportedModel
from greenroom.core.generation import FinishReason
from greenroom.moe.attention.ragged_attention import cache_argument
from greenroom.moe.forward.ragged_model import RaggedModel
from tests.contract.batching.harness import (
    SLIDING,
    Driver,
    cases,
    generate,
    generate_logits,
    prompt_of,
    ragged,
    recorded,
    request,
)
from tests.random_checkpoints import DECODER_ONLY, random_model, randomise

LENGTHS = (1, 4, 13, 29, 22, 9)


@cases()
def test_greedy_tokens_are_those_of_generate_while_requests_join_and_leave(family: str, attention: str) -> None:
    check(family, attention, {})


@cases(SLIDING)
def test_windows_shorter_than_the_prompt(family: str, attention: str) -> None:
    check(family, attention, SLIDING[family])
    assert generate(prompt_of(29), 8, family, attention) != generate(
        prompt_of(29), 8, family, attention, **SLIDING[family]
    ), "the window changes nothing, so this shows nothing"


def check(family: str, attention: str, changes: dict[str, Any]) -> None:
    """Chunks of at most 5 rows, 9 rows a step: prompts join over many steps, beside others that decode already."""
    driver = Driver(ragged(family, attention, **changes), tokens_per_step=9, prefill_chunk=5)
    wanted = [3 if length == 13 else 10 for length in LENGTHS]
    answers = []
    for place, (length, tokens) in enumerate(zip(LENGTHS, wanted, strict=True)):
        answers.append(driver.add(request(f"r{place}", prompt_of(length), tokens)))
        for _ in range(place):
            driver.step()
    leaving = driver.add(request("leaves", prompt_of(17), 10))
    while len(leaving.tokens) < 4:
        assert driver.step()
    driver.engine.cancel(leaving.number)
    driver.run()

    for length, tokens, answer in zip(LENGTHS, wanted, answers, strict=True):
        assert answer.ids == generate(prompt_of(length), tokens, family, attention, **changes)
        assert answer.finished is not None
        assert answer.finished.reason is FinishReason.LENGTH
        assert (answer.finished.prompt_tokens, answer.finished.generated_tokens) == (length, tokens)
    assert leaving.ids == generate(prompt_of(17), 10, family, attention, **changes)[: len(leaving.tokens)]
    assert leaving.finished is not None
    assert leaving.finished.reason is FinishReason.CANCELLED


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@cases()
def test_a_request_alone_has_the_logits_of_generate_to_the_bit(family: str, attention: str, dtype: torch.dtype) -> None:
    model = ragged(family, attention, dtype)
    driver = Driver(model)
    answer = driver.add(request("alone", prompt_of(21), 6))
    with recorded(model) as seen:
        driver.run()
    assert answer.ids == generate(prompt_of(21), 6, family, attention, dtype)
    assert torch.equal(torch.cat(seen).float(), generate_logits(prompt_of(21), 6, family, attention, dtype).float())


@pytest.mark.parametrize("family", DECODER_ONLY)
def test_bytes_per_token_are_what_the_family_itself_keeps(family: str) -> None:
    model = random_model(family)
    cache = DynamicCache()
    model(torch.tensor([prompt_of(8)]), **{cache_argument(model): cache})
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert ragged(family, "eager").layout.bytes_per_token * 8 == kept


@pytest.mark.parametrize("family", DECODER_ONLY)
def test_the_same_batch_has_the_same_bits_again(family: str) -> None:
    def run() -> list[torch.Tensor]:
        model = ragged(family, "eager" if family == "gpt_oss" else "sdpa", torch.bfloat16)
        driver = Driver(model, tokens_per_step=16)
        for length in (3, 30, 12):
            driver.add(request(f"r{length}", prompt_of(length), 5))
        with recorded(model) as seen:
            driver.run()
        return seen

    first, second = run(), run()
    assert len(first) == len(second) > 5
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_attention_of_its_own_can_not_be_replaced_by_sdpa() -> None:
    with pytest.raises(InvalidConfig, match="gpt_oss has an attention of its own"):
        RaggedModel(random_model("gpt_oss"), attention="sdpa")
    with pytest.raises(InvalidConfig, match="allowed: sdpa, eager"):
        RaggedModel(random_model("mixtral"), attention="flash_attention_2")


def tiny(config: str, model: str, **fields: Any) -> Any:
    common = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return getattr(transformers, model)(getattr(transformers, config)(**{**common, **fields})).eval()


def test_layers_with_a_running_state_are_refused_by_name() -> None:
    hybrid = tiny(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    )
    with pytest.raises(UnsupportedModel, match=r"qwen3_next has layers with a running state \(linear_attention\)"):
        RaggedModel(hybrid)


def test_layers_that_keep_more_than_keys_and_values_are_refused_by_name() -> None:
    indexed = tiny(
        "DeepseekV32Config",
        "DeepseekV32ForCausalLM",
        num_key_value_heads=4,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=64,
    )
    with pytest.raises(UnsupportedModel, match="deepseek_v32 can not run in the batch loop: its layers keep more"):
        RaggedModel(indexed)


def test_attention_in_fixed_chunks_of_the_context() -> None:
    """Llama 4's layers see their own chunk of positions only: neither causal over all nor a sliding window."""

    def llama(seed: int = 0) -> Any:
        model = tiny(
            "Llama4TextConfig",
            "Llama4ForCausalLM",
            vocab_size=260,
            head_dim=8,
            intermediate_size_mlp=32,
            num_local_experts=4,
            attention_chunk_size=7,
            layer_types=["chunked_attention", "full_attention"],
        )
        randomise(model, seed)
        return model

    own, driver = llama(), Driver(RaggedModel(llama()), tokens_per_step=9, prefill_chunk=4)
    answers = {length: driver.add(request(str(length), prompt_of(length), 9)) for length in (3, 12, 25)}
    driver.run()
    for length, answer in answers.items():
        out = own.generate(
            torch.tensor([prompt_of(length)]),
            attention_mask=torch.ones(1, length, dtype=torch.long),
            max_new_tokens=9,
            min_new_tokens=9,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert answer.ids == tuple(out[0, length:].tolist())


def test_encoder_decoders_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="switch_transformers is an encoder-decoder"):
        RaggedModel(random_model("switch_transformers"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_mixes_rows_is_found_out_before_the_first_request(dtype: torch.dtype) -> None:
    model = random_model("mixtral", dtype=dtype)
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output + args[0].mean(1, keepdim=True))
    with pytest.raises(UnsupportedModel, match="mixtral computes something else in the batch loop than alone"):
        RaggedModel(model)
    assert model.config._attn_implementation == "sdpa", "a refused model is left as it was"


def test_a_model_that_fails_on_the_way_is_refused_with_the_reason() -> None:
    model = random_model("mixtral")

    def own_mask(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": None}

    model.model.layers[2].register_forward_pre_hook(own_mask, with_kwargs=True)
    with pytest.raises(UnsupportedModel, match="mixtral can not run in the batch loop: MixtralAttention builds"):
        RaggedModel(model)


def test_rotary_frequencies_that_depend_on_the_batch_end_where_they_begin_to() -> None:
    config = random_model("phimoe").config
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "short_mscale": 1.1,
        "long_mscale": 1.2,
        "original_max_position_embeddings": 32,
    }
    model = RaggedModel(type(random_model("phimoe"))(config).eval())
    assert model.max_positions == 32


def test_restore_gives_the_model_its_own_attention_back() -> None:
    model = random_model("granitemoe")
    model.set_experts_implementation("eager")
    ours = RaggedModel(model)
    with pytest.raises(RuntimeError, match="for the batch loop's forwards only"):
        model(torch.tensor([[5, 6]]))
    ours.restore()
    out = model.generate(torch.tensor([prompt_of(9)]), max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert tuple(out[0, 9:].tolist()) == generate(prompt_of(9), 5, "granitemoe")
