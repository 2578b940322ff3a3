"""``python -m benchmarks.pipeline``: what Kafka, gRPC and the services cost.

Two arms take turns on the same model and the same requests: the engine called in its own process, and the pipeline over
a real broker through its HTTP API. In both the engine's process (in the pipeline a worker's) has core 0 to itself. All
else, the client included, shares core 1. Parts: saturation, added latency at half of that, three times the saturating
rate, and the gateway's ceiling with a worker that has no model. Ends with one JSON object.

``--beside FOLDER`` takes turns with another checkout, such as main's: its engine and its pipeline, on the same broker
and in the same rounds, with this checkout's benchmark as the client. Each pipeline is compared with its own engine.

``--experts-mib 0.5`` gives the same model experts of that size, padded with zeros: longer steps, and the same texts.

``--pin thread`` leaves core 0 to the engine's thread alone. The worker's event loop then shares core 1 with the other
processes. If one of them takes the core while the loop holds the interpreter's lock, the engine waits on an idle core:
that measures two cores, not the pipeline.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.harness.children.processes import exit_on_sigterm
from benchmarks.harness.inputs.checkpoints import widened
from benchmarks.harness.machine import cache_folder, describe_machine
from benchmarks.harness.reporting.results import write_result
from benchmarks.pipeline import added_latency, gateway_ceiling, overload, saturation
from benchmarks.pipeline.added_latency import Latency
from benchmarks.pipeline.arms import Effort, opened
from benchmarks.pipeline.checkouts import Checkout
from benchmarks.pipeline.figures import spreads
from benchmarks.pipeline.report import print_report
from greenroom.demo import bundled_model_path
from tests.kafka.broker import JarBroker


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Rounds of each comparison.")
@click.option("--seconds", default=20.0, show_default=True, help="Of each arm in a round.")
@click.option("--tokens", type=click.IntRange(min=2), default=32, show_default=True, help="Generated for each request.")
@click.option("--max-running", default=16, show_default=True, help="Requests that generate at once, in both arms.")
@click.option("--overload-seconds", default=60.0, show_default=True, help="At three times the saturating rate.")
@click.option(
    "--pin",
    "pinned",
    type=click.Choice(["process", "thread"]),
    default="process",
    show_default=True,
    help="What has core 0 to itself: the process that the engine is in, or the engine's thread.",
)
@click.option(
    "--beside",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Another checkout, with compiled products, to take turns with.",
)
@click.option(
    "--experts-mib", type=float, help="Of each expert: longer steps.  [default: as the bundled model has them]"
)
@click.option(
    "--skip", type=click.Choice(["overload", "ceiling"]), multiple=True, help="A part to leave out; may be repeated."
)
@click.option("--quick", is_flag=True, help="All of it in about two minutes; its figures say little.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("artifacts/bench-pipeline"), show_default=True)
def main(
    rounds: int,
    seconds: float,
    tokens: int,
    max_running: int,
    overload_seconds: float,
    pinned: str,
    beside: Path | None,
    experts_mib: float | None,
    skip: Sequence[str],
    quick: bool,
    out: Path,
) -> None:
    """Measure and print."""
    exit_on_sigterm()
    if quick:
        rounds, seconds, overload_seconds = 2, 4.0, 8.0
    effort = Effort(
        rounds=rounds,
        seconds=seconds,
        tokens=tokens,
        max_running=max_running,
        overload_seconds=overload_seconds,
        thread_only=pinned == "thread",
        model=bundled_model_path() if experts_mib is None else widened(experts_mib),
    )
    other = None if beside is None else Checkout.beside(beside)
    with tempfile.TemporaryDirectory(prefix="greenroom-bench-") as temporary:
        folder = Path(temporary)
        broker = JarBroker(folder / "broker")
        try:
            broker.start()
            document = _measure(broker, folder, effort, Checkout.here(), other, skip)
        finally:
            broker.remove()
    document |= {"machine": describe_machine(cache_folder()), "quick": quick}
    print_report(document)
    print(write_result(document, out / "pipeline.json"))


def _measure(
    broker: JarBroker, folder: Path, effort: Effort, ours: Checkout, beside: Checkout | None, skip: Collection[str]
) -> dict[str, Any]:
    with opened(broker, folder, effort, ours, beside) as arms:
        saturated = saturation.measure(arms)
        rate = min(one["requests_per_s"] for one in saturated) / 2  # which no side finds hard
        started = arms.ours.prefill()
        latency, compared = added_latency.measure(arms, rate)
        for_nothing = {"latency": arms.ours.prefill().share_since(started)}
        overloaded = None
        if "overload" not in skip:
            started = arms.ours.prefill()
            overloaded = overload.measure(arms, saturated[0]["requests_per_s"])
            for_nothing["overload"] = arms.ours.prefill().share_since(started)
    ceiling = None
    if "ceiling" not in skip:
        ceiling = gateway_ceiling.measure(broker, folder / "stub", arms.texts, effort, arms.rows)
    own, *others = [
        _figures(one, saturation, side.checkout)
        for one, saturation, side in zip(latency, saturated, arms.sides, strict=True)
    ]
    document = {
        **own,
        "gateway_tokens_per_s": None if ceiling is None else ceiling["tokens_per_s"]["median"],
        "prefill_share_for_nothing": {part: round(share, 4) for part, share in for_nothing.items()},
        "rate_per_s": round(rate, 2),
        "ceiling": ceiling,
        "overload": overloaded,
        "settings": {
            "rounds": effort.rounds,
            "seconds": effort.seconds,
            "tokens": effort.tokens,
            "max_running": effort.max_running,
            "pin": "thread" if effort.thread_only else "process",
            "model": effort.model.name,
        },
        "rows": arms.rows,
    }
    for other in others:
        document |= _over_main(own, other, compared)
    return document


def _figures(latency: Latency, saturated: dict[str, Any], checkout: Checkout) -> dict[str, Any]:
    """One checkout's."""
    added = spreads(latency.rounds)
    cpu, cpu_of = latency.processor_time()
    names = ("ttft_added_p50_ms", "ttft_added_p99_ms", "itl_added_p50_ms")
    return {
        "commit": checkout.commit,
        **{name: added[name]["median"] for name in names},
        "throughput_ratio": saturated["ratio"]["median"],
        "cpu_s_per_1000_tokens_outside_worker": cpu["outside_worker"],
        "spread": {**added, "throughput_ratio": saturated["ratio"]},
        "saturation": saturated,
        "cpu_s_per_1000_tokens": cpu,
        "cpu_ms_per_request": cpu_of,
    }


def _over_main(own: dict[str, Any], other: dict[str, Any], compared: list[dict[str, float]]) -> dict[str, Any]:
    """What the two come to beside each other; ``beside`` has the other's own figures."""
    rounds = spreads(compared)
    return {
        **{name: spread["median"] for name, spread in rounds.items()},
        "throughput_over_main": own["saturation"]["pipeline"]["median"] / other["saturation"]["pipeline"]["median"],
        "cpu_outside_worker_over_main": own["cpu_s_per_1000_tokens_outside_worker"]
        / other["cpu_s_per_1000_tokens_outside_worker"],
        "beside": other,
        "spread": {**own["spread"], **rounds},
    }
