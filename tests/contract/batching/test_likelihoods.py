"""In fp32: a prompt's log-probabilities are those of one forward of the whole text by transformers, and penalties give
the text that transformers' own processors give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from greenroom.moe.batch.batch_config import SCORED_ROWS
from tests.contract.batching.harness import Driver, cases, own, prompt_of, ragged, request

PROMPT = prompt_of(3 * SCORED_ROWS + 5)
EOS = 2


def whole_forward(family: str, attention: str, text: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities ``[tokens, vocabulary]`` of what follows each token."""
    with torch.inference_mode():
        logits: torch.Tensor = own(family, attention)(torch.tensor([text])).logits[0]
    return logits.log_softmax(-1)


@cases()
def test_likelihoods_are_those_of_one_forward_of_the_whole_text(family: str, attention: str) -> None:
    driver = Driver(ragged(family, attention), tokens_per_step=48, max_running=4)
    company = driver.add(request("company", prompt_of(9), 20))
    driver.step()
    answers = [driver.add(request(f"r{tokens}", PROMPT, tokens, prompt_logprobs=3, logprobs=0)) for tokens in (0, 1, 6)]
    driver.run()
    assert company.finished is not None
    for answer in answers:
        text = (*PROMPT, *answer.ids)
        wanted = whole_forward(family, attention, text)
        assert answer.finished is not None
        assert answer.finished.prompt_logprobs is not None
        found = [one.chosen for one in answer.finished.prompt_logprobs]
        found += [token.logprobs.chosen for token in answer.tokens if token.logprobs is not None]
        assert len(found) == len(text) - 1
        assert found == pytest.approx([float(wanted[place, token]) for place, token in enumerate(text[1:])], abs=2e-4)
        for place, one in enumerate(answer.finished.prompt_logprobs):
            best = wanted[place].topk(3)
            assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=2e-4)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
        ({"min_tokens": 9, "ignore_eos": False}, {"min_new_tokens": 9, "eos_token_id": EOS}),
        ({"logit_bias": ((7, 3.0), (8, -2.0))}, {"sequence_bias": [[[7], 3.0], [[8], -2.0]]}),
        (
            {"logit_bias": ((7, 3.0),), "repetition_penalty": 1.2, "min_tokens": 4, "ignore_eos": False},
            {
                "sequence_bias": [[[7], 3.0]],
                "repetition_penalty": 1.2,
                "min_new_tokens": 4,
                "eos_token_id": EOS,
            },
        ),
    ],
)
def test_changed_logits_give_the_text_that_transformers_gives(
    family: str, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    prompt = prompt_of(11)
    out = own(family, "sdpa").generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=20,
        do_sample=False,
        pad_token_id=0,
        **{"eos_token_id": None, **theirs},
    )
    driver = Driver(ragged(family), eos_token_ids=[EOS])
    answer = driver.add(request("a", prompt, 20, **ours))
    driver.run()
    assert answer.ids == tuple(out[0, len(prompt) :].tolist())
