"""The paper's Figs 5 and 6, and its Table 2, as one picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.reporting.plots import grouped_bars, legend_below, logarithmic, panels_of, save, style_of, tidy


def draw(found: Mapping[str, Any], path: Path) -> None:
    systems = found["systems"]
    figure, (latency, throughput, memory) = panels_of(3, 1, height=3.0)
    grouped_bars(
        latency,
        ["to first token", "to last token"],
        {name: [own["ttft_s"], own["end_to_end_s"]] for name, own in systems.items()},
    )
    logarithmic(latency)
    latency.set_ylabel("s")
    latency.set_title("latency of single requests (Fig. 5)", fontsize=9)
    for place, (name, own) in enumerate(systems.items()):
        speeds = own["decode_tokens_per_s"]
        shares = [(number + 1) / len(speeds) for number in range(len(speeds))]
        throughput.step(speeds, shares, where="post", label=name, color=style_of(place)["color"])
    logarithmic(throughput, "x")
    throughput.set(xlabel="tokens/s while decoding", ylabel="share of requests")
    throughput.set_title("decoding throughput (Fig. 6)", fontsize=9)
    grouped_bars(memory, ["peak"], {name: [{"mean": own["peak_mib"]}] for name, own in systems.items()})
    logarithmic(memory)
    memory.set_ylabel("MiB")
    memory.set_title("memory for experts, predictor and steps (Table 2)", fontsize=9)
    for panel in (latency, throughput, memory):
        tidy(panel)
    legend_below(figure, [latency], columns=3)
    save(figure, path)
