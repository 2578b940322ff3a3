"""The stage's figures as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.duoserve.paper.figures import RATIOS


def table(found: Mapping[str, Any]) -> str:
    model, settings = found["model"], found["settings"]
    lines = [
        f"{model['experts']} experts of {model['expert_mib']:.0f} MiB in {model['layers']} layers, "
        f"top-{model['top_k']}; {settings['prompts']} single requests a round, answers of {settings['tokens']} tokens, "
        f"{settings['rounds']} rounds in turns. Medians of the rounds; same answers of all: {found['same_answers']}",
        f"{'':<28}{'slots':>6}{'TTFT, s':>10}{'all, s':>9}{'ms/token':>10}{'stall':>8}"
        f"{'prompt MiB':>12}{'MiB/token':>11}{'peak MiB':>10}",
    ]
    for name, own in found["systems"].items():
        lines.append(
            f"{name:<28}{own['slots']:>6}{own['ttft_s']['median']:>10.3f}{own['end_to_end_s']['median']:>9.3f}"
            f"{own['decode_ms']['median']:>10.1f}{own['decode_stall_ms']:>8.1f}{own['prefill_mib']:>12.0f}"
            f"{own['decode_mib_a_token']:>11.0f}{own['peak_mib']:>10.0f}"
        )
    lines += ["", f"{'times as fast':<52}{'all':>20}{'to first token':>20}{'decoding':>20}"]
    for name, (slow, fast) in RATIOS.items():
        own = found["ratios"][name]
        cells = "".join(f"{_spread(own[measure]):>20}" for measure in ("end_to_end", "ttft", "decode"))
        lines.append(f"{f'{fast} / {slow}':<52}{cells}")
    gains = found["gains"]
    lines += [
        "",
        f"decoding at top-k slots: computing {_spread(gains['computing_ms'], 1)} ms a token, moving "
        f"{_spread(gains['moving_ms'], 1)} ms. So prediction gains at most {_spread(gains['at_most'])} over "
        f"fetching on demand; with {_spread(gains['bytes_ratio'])} times the bytes, since some are foreseen "
        f"wrongly, at most {_spread(gains['at_most_with_what_is_wrong'])}; measured {_spread(gains['measured'])}",
    ]
    return "\n".join(lines)


def _spread(value: Mapping[str, float], digits: int = 2) -> str:
    return f"{value['median']:.{digits}f} ({value['min']:.{digits}f}–{value['max']:.{digits}f})"
