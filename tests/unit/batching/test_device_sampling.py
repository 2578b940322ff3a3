"""Rows sampled together, as on a device, give what they give one by one; and the device is waited for once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.generation import SamplingParams
from greenroom.moe.batch.device_sampling import sample_together
from greenroom.moe.batch.logit_changes import Draw, InvalidLogits, TokenCounts
from greenroom.moe.batch.sampling import sample
from tests.examples import examples
from tests.stand_in_device import StandInTensor, stand_in, watched

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-300, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 20, 512, 513, 5000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-6, 0.0]),
    logprobs=st.sampled_from([None, 0, 3, 20]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.6, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.3, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    logit_bias=st.sampled_from([(), (), ((0, 3.0), (1, -100.0))]),
)


def draw(params: SamplingParams, key: int, position: int, vocabulary: int) -> Draw:
    """Behind a few tokens of which some were generated; every other row may not end yet."""
    counts = TokenCounts([1, 0, vocabulary - 1])
    for token in (0, vocabulary // 2, 0):
        counts.add(token)
    banned = (1, vocabulary - 1, vocabulary + 5) if position % 2 and vocabulary > 2 else ()
    return Draw(params, key, position, counts if params.penalises else None, banned)


@given(
    params=st.lists(PARAMS, min_size=1, max_size=6),
    vocabulary=st.sampled_from([2, 15, 512, 513, 3000]),
    spread=st.sampled_from([0.1, 2.0, 9.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    trouble=st.sampled_from([None, torch.nan, torch.inf, -torch.inf]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=examples(150), deadline=None)
def test_rows_sampled_together_get_the_tokens_that_they_get_alone(
    params: list[SamplingParams], vocabulary: int, spread: float, dtype: torch.dtype, trouble: float | None, seed: int
) -> None:
    """bf16 has many equal logits; wide and flat rows have nuclei of more tokens than are looked through at first."""
    noise = torch.Generator().manual_seed(seed)
    logits = (torch.randn(len(params), vocabulary, generator=noise) * spread).to(dtype)
    if trouble is not None:
        logits[0, ::2] = trouble
    draws = [draw(one, seed, 7 * place, vocabulary) for place, one in enumerate(params)]
    together, alone = sample_together(logits, draws), sample(logits, draws)
    for ours, theirs in zip(together, alone, strict=True):
        if isinstance(theirs, InvalidLogits):
            assert isinstance(ours, InvalidLogits)
            assert str(ours) == str(theirs)
        else:
            assert ours == theirs


@pytest.mark.parametrize(("spread", "looks"), [(4.0, 1), (0.01, 2)])
def test_the_device_is_waited_for_once(monkeypatch: pytest.MonkeyPatch, spread: float, looks: int) -> None:
    """Twice where a nucleus is wide."""
    logits = torch.randn(12, 4000, generator=torch.Generator().manual_seed(0)) * spread
    every = [
        SamplingParams(temperature=t, top_k=k, top_p=p, logprobs=n)
        for t, k, p, n in ((0, 0, 1, None), (1, 0, 1, 2), (1, 50, 1, None), (0.7, 0, 0.5, 5))
    ]
    every += [
        SamplingParams(temperature=1, min_p=0.1),
        SamplingParams(temperature=0.7, top_p=0.5, repetition_penalty=1.2, presence_penalty=1, logprobs=1),
    ]
    draws = [draw(one, 3, place, 4000) for place, one in enumerate(every * 2)]
    with stand_in(monkeypatch), watched() as watch, torch.inference_mode():
        found = sample_together(StandInTensor(logits), draws)
    assert len(watch.blocking) == looks, watch.blocking
    assert found == sample(logits, draws)
