"""The result as a person reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.reporting.aims import Aim

AIMS = {
    "ttft_added_p50_ms": Aim(15.0, at_least=False),
    "ttft_added_p99_ms": Aim(50.0, at_least=False),
    "itl_added_p50_ms": Aim(2.0, at_least=False),
    "throughput_ratio": Aim(0.95, at_least=True),
}
BESIDE = {
    "ttft_added_p50_over_main": Aim(0.6, at_least=False),
    "ttft_added_p99_over_main": Aim(0.6, at_least=False),
    "cpu_outside_worker_over_main": Aim(0.7, at_least=False),
}


def print_report(document: dict[str, Any]) -> None:
    """Figures with their aims, then what lies beside them."""
    print(
        f"\nat {document['rate_per_s']} requests/s, half of what saturates the pipeline; medians of rounds (least-most)"
    )
    for name, aim in AIMS.items():
        row = document["spread"][name]
        print(
            f"  {name:<22}{row['median']:>9.2f}  ({row['min']:.2f}-{row['max']:.2f})  aim {aim}, "
            f"{aim.verdict(row['median'])}"
        )
    row = document["spread"]
    print(
        f"  TTFT {row['ttft_engine_p50_ms']['median']:.1f} → {row['ttft_pipeline_p50_ms']['median']:.1f} ms "
        f"(× {row['ttft_ratio_p50']['median']:.2f}), between tokens {row['itl_engine_p50_ms']['median']:.2f} → "
        f"{row['itl_pipeline_p50_ms']['median']:.2f} ms (× {row['itl_ratio_p50']['median']:.2f})"
    )
    cpu = document["cpu_s_per_1000_tokens"]
    print(
        f"  CPU seconds for 1000 tokens: services {cpu['services']:.3f}, broker {cpu['broker']:.3f}, worker "
        f"{cpu['worker']:.3f}"
    )
    each = ", ".join(f"{name} {spent:.1f}" for name, spent in document["cpu_ms_per_request"].items())
    print(f"  CPU milliseconds for a request of {document['settings']['tokens']} tokens: {each}")
    shares = ", ".join(f"{part} {share:.2%}" for part, share in document["prefill_share_for_nothing"].items())
    print(f"  prefill done for nothing, of all rows of prompts: {shares}")
    if (ceiling := document["ceiling"]) is not None:
        print(
            f"  without a model: {ceiling['requests_per_s']['median']:.0f} requests/s, "
            f"{ceiling['tokens_per_s']['median']:.0f} tokens/s"
        )
    if (over := document["overload"]) is not None:
        _print_overload(over)
    if (beside := document.get("beside")) is not None:
        _print_beside(document, beside)


def _print_overload(over: Mapping[str, Any]) -> None:
    memory = f"{over['resident_bytes_before'] >> 20} → {over['resident_bytes_after'] >> 20} MiB"
    print(
        f"  overload: {over['accepted']} of {over['requests']} accepted, TTFT at most "
        f"{over['accepted_ttft_max_ms']:.0f} ms (bound {over['queue_wait_bound_ms']:.0f}), refused {over['refused']}, "
        f"memory {memory}, p50 after {over['ttft_p50_after_ms']} ms (before {over['ttft_p50_before_ms']})"
    )


def _print_beside(document: Mapping[str, Any], beside: Mapping[str, Any]) -> None:
    cpu = [one["cpu_s_per_1000_tokens_outside_worker"] for one in (document, beside)]
    print(
        f"  {document['commit']} beside {beside['commit']}: added {document['ttft_added_p50_ms']:.1f} and "
        f"{beside['ttft_added_p50_ms']:.1f} ms (p99 {document['ttft_added_p99_ms']:.1f} and "
        f"{beside['ttft_added_p99_ms']:.1f}), CPU outside the worker {cpu[0]:.3f} and {cpu[1]:.3f} s for 1000 tokens, "
        f"throughput {document['throughput_ratio']:.3f} and {beside['throughput_ratio']:.3f} of the engine's "
        f"(pipelines × {document['throughput_over_main']:.3f})"
    )
    for name, aim in BESIDE.items():
        print(f"  {name:<30}{document[name]:>7.2f}  aim {aim}, {aim.verdict(document[name])}")
