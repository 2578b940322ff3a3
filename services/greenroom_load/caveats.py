"""What a reader of a run's figures must know before believing them."""

from __future__ import annotations

from greenroom_load.figures import FEW_SAMPLES, LATE_S, PERCENTILES, Figures

LATE_SHARE = 0.01
LAG_P99_MS = 10.0
CPU_SHARE = 0.8
ZERO_GAP_SHARE = 0.05


def too_slow(found: Figures, *, closed_loop: bool) -> list[str]:
    """Reasons to think that the generator itself was the bottleneck; empty if there are none."""
    reasons = []
    sent = found.lateness.n
    if not closed_loop and sent and found.late > max(1, LATE_SHARE * sent):
        worst = found.lateness.percentiles[99]
        reasons.append(
            f"{found.late} of {sent} requests were sent more than {LATE_S * 1e3:g} ms late (p99 {worst:.1f} ms): "
            f"the load was not the one asked for"
        )
    lag = found.loop_lag.percentiles[99]
    if lag > LAG_P99_MS:
        others = (
            "" if found.cpu_share > CPU_SHARE / 2 else "; other processes want its core, since it took little of it"
        )
        reasons.append(
            f"the generator's event loop lagged by {lag:.1f} ms (p99): latencies are that much too long{others}"
        )
    if found.cpu_share > CPU_SHARE:
        reasons.append(
            f"the generator took {found.cpu_share:.0%} of a core: give it a core of its own, or lower the rate"
        )
    return reasons


def caveats(found: Figures, *, interrupted: bool, closed_loop: bool) -> list[str]:
    """All that is worth a word, the gravest first."""
    whole = found.whole
    said = [f"too slow to trust: {reason}" for reason in too_slow(found, closed_loop=closed_loop)]
    if interrupted:
        said.insert(0, "the run was interrupted: the figures are of what was sent until then")
    if whole.failed:
        said.append(f"{whole.failed} of {whole.requests} requests failed: latencies are those of the others only")
    if unsent := sum(count for label, count in whole.failures.items() if label.startswith("not sent")):
        said.append(f"{unsent} requests could not be sent in their time and count as failed")
    few = [name for name, spread in whole.latencies.named().items() if spread.few]
    if few:
        named = ", ".join(few)
        said.append(
            f"percentiles marked * are of fewer than {FEW_SAMPLES} samples ({named}): "
            f"take p{PERCENTILES[-1]} as the largest one seen"
        )
    if found.tokens_counted:
        said.append(
            f"the server gave no token counts for {found.tokens_counted} replies: parts of the stream are counted, "
            f"which are fewer than tokens where a part brings several"
        )
    if whole.completed and not whole.input_tokens:
        said.append("the server gave no counts of prompt tokens: total token throughput is that of the output alone")
    gaps = whole.latencies.itl.n
    if found.gaps_of_zero > ZERO_GAP_SHARE * gaps:
        said.append(
            f"{found.gaps_of_zero / gaps:.0%} of the gaps between tokens are 0, since several parts came in one read: "
            f"TPOT says more than the median ITL"
        )
    if found.repeats:
        said.append(f"{found.repeats} prompts were asked before in this run: caches of prompts may have answered them")
    return said
