"""A run as a person reads it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from greenroom import __version__
from greenroom_load.figures import LATE_S, Group, Spread
from greenroom_load.report import Report

_LATENCIES = {
    "ttft": "TTFT",
    "ttft_intended": "TTFT, from intended send",
    "tpot": "TPOT, without the first",
    "itl": "ITL",
    "e2el": "E2E",
    "e2el_intended": "E2E, from intended send",
}


def as_text(report: Report) -> str:
    """The whole report. Milliseconds unless it says otherwise; ``*`` marks percentiles of few samples."""
    blocks = [_head(report), _totals(report), _latencies(report.found.whole)]
    if len(report.found.by_task) > 1 or "-" not in report.found.by_task:
        blocks.append(_tasks(report))
    if report.found.whole.failures:
        counted = [f"  {count:>6}  {label}" for label, count in report.found.whole.failures.items()]
        blocks.append("\n".join(["failed", *counted]))
    blocks.append(_client(report))
    if report.warnings:
        blocks.append("\n".join(f"! {warning}" for warning in report.warnings))
    return "\n\n".join(blocks)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells in columns, the first to the left, the others to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def number(value: float | None) -> str:
    """Three digits that mean something; ``-`` for what was not measured."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _head(report: Report) -> str:
    setup, plan, bounds = report.setup, report.setup.plan, report.setup.plan.bounds
    limits = [
        f"{bounds.num_requests} requests" if bounds.num_requests is not None else "",
        f"{bounds.duration_s:g} s" if bounds.duration_s is not None else "",
        f"at most {bounds.max_concurrency} at once" if bounds.max_concurrency is not None else "",
    ]
    lengths = f"replies of {'' if setup.style.ignore_eos else 'at most '}{plan.output}"
    if plan.input is not None:
        lengths += f", prompts of about {plan.input}"
    label = f"   {setup.label}" if setup.label else ""
    return "\n".join(
        [
            f"greenroom-load {__version__}   {report.started:%Y-%m-%d %H:%M:%S} UTC{label}",
            f"command   greenroom-load {shlex.join(setup.command)}",
            f"server    {setup.url}   model {setup.model}   ({setup.backend})",
            f"load      {plan.arrivals}; {', '.join(limit for limit in limits if limit)}; "
            f"{'closed' if setup.closed_loop else 'open'} loop; seed {plan.seed}; "
            f"{bounds.warmup_requests} warm-up requests",
            f"prompts   {plan.prompts}; {plan.mix}",
            f"tokens    {lengths}",
        ]
    )


def _totals(report: Report) -> str:
    found, whole = report.found, report.found.whole
    lines = [
        f"requests  {whole.requests} ({found.offered_rate:.3g}/s offered), {whole.completed} completed, "
        f"{whole.failed} failed; in flight {found.mean_in_flight:.1f} on average, {found.peak_in_flight} at most",
        f"time      {found.duration_s:.1f} s: {found.sending_s:.1f} s sending, "
        f"{found.duration_s - found.sending_s:.1f} s until the last reply",
        f"rates     {found.request_throughput:.2f} requests/s, {found.output_throughput:.1f} output tokens/s, "
        f"{found.total_token_throughput:.1f} tokens/s in all; "
        f"while sending {found.request_throughput_while_sending:.2f} requests/s, "
        f"{found.output_throughput_while_sending:.1f} output tokens/s",
        f"tokens    {whole.input_tokens} of prompts, {whole.output_tokens} of replies; "
        f"at most {found.peak_tokens_per_s:.0f} in a second",
    ]
    if found.goodput is not None and found.good is not None and found.request_goodput is not None:
        lines.append(
            f"goodput   {found.request_goodput:.2f} requests/s: {found.good} of {whole.requests} with {found.goodput}"
        )
    if whole.attainment is not None:
        lines.append(f"SLO       {whole.met} of {whole.with_targets} requests met theirs ({whole.attainment:.1%})")
    if whole.checked:
        lines.append(
            f"answers   {whole.right} of {whole.checked} checked are right ({whole.right / whole.checked:.1%})"
        )
    if whole.approximated:
        lines.append(f"routing   {whole.approximated:.2%} approximated, by what the replies say (mean)")
    return "\n".join(lines)


def _latencies(whole: Group) -> str:
    rows: list[tuple[str, ...]] = [("ms", "n", "mean", "median", "std", "p90", "p95", "p99")]
    spreads = whole.latencies.named()
    for name, title in _LATENCIES.items():
        spread = spreads[name]
        high = [_marked(spread, level) for level in (90, 95, 99)]
        rows.append((title, str(spread.n), number(spread.mean), number(spread.median), number(spread.std), *high))
    return columns(rows)


def _tasks(report: Report) -> str:
    heads = ("task", "requests", "failed", "tokens out", "TTFT p50", "p99", "TPOT p50", "E2E p50", "p99", "SLO met")
    rows: list[tuple[str, ...]] = [(*heads, "answers right")]
    for task, group in report.found.by_task.items():
        timed = group.latencies
        rows.append(
            (
                task,
                str(group.requests),
                str(group.failed),
                str(group.output_tokens),
                number(timed.ttft.median),
                _marked(timed.ttft, 99),
                number(timed.tpot.median),
                number(timed.e2el.median),
                _marked(timed.e2el, 99),
                "-" if group.attainment is None else f"{group.attainment:.1%}",
                f"{group.right}/{group.checked}" if group.checked else "-",
            )
        )
    return columns(rows)


def _client(report: Report) -> str:
    found = report.found
    late = f"{found.late} of {found.lateness.n} sent more than {LATE_S * 1e3:g} ms late"
    return (
        f"generator {late} (p99 {number(found.lateness.percentiles[99])} ms); event loop's lag p99 "
        f"{number(found.loop_lag.percentiles[99])} ms; {found.cpu_share:.0%} of a core"
    )


def _marked(spread: Spread, level: int) -> str:
    return number(spread.percentiles[level]) + ("*" if spread.few else "")
