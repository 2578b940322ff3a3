"""What of a step with both kinds of rows is put down to those that decode."""

from __future__ import annotations

from greenroom.core.model_profile import MeasuredCosts
from greenroom.profiling.measures.costs import share_beside

ALONE = MeasuredCosts(token_ms_by_rows={1: 10.0, 4: 6.0}, prefill_token_ms=5.0, prompt_step_ms={8: 20.0, 16: 30.0})


def test_it_is_the_median_share_of_a_decode_step_that_steps_with_prompts_took_longer() -> None:
    assert share_beside(ALONE, [(4, 8, 0.032), (4, 16, 0.042), (1, 8, 9.0)]) == 0.5
    assert share_beside(ALONE, [(4, 8, 0.001)]) == 0.0
    assert share_beside(ALONE, [(4, 8, 1.0)]) == 1.0


def test_where_nothing_was_measured_it_is_not_known() -> None:
    assert share_beside(ALONE, []) is None
