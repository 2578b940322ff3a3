"""A run as JSON: the keys of vLLM's serving benchmark, then what it does not have."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from greenroom.core.errors import InvalidConfig
from greenroom_load.caveats import caveats, too_slow
from greenroom_load.figures import Figures, Group, Spread, figures
from greenroom_load.reply_record import Record
from greenroom_load.run_setup import Setup
from greenroom_load.runner import Outcome
from greenroom_load.series import distributions, series
from greenroom_load.targets import Targets

FORMAT = 1
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """A run with its figures. docs/architecture/loadgen.md lists the keys of ``as_json``."""

    setup: Setup
    outcome: Outcome
    found: Figures

    @classmethod
    def of(cls, setup: Setup, outcome: Outcome, goodput: Targets | None) -> Report:
        return cls(setup, outcome, figures(outcome, goodput))

    @property
    def started(self) -> datetime:
        return datetime.fromtimestamp(self.outcome.started, UTC)

    @property
    def warnings(self) -> list[str]:
        return caveats(self.found, interrupted=self.outcome.interrupted, closed_loop=self.setup.closed_loop)

    @property
    def trustworthy(self) -> bool:
        """Whether the generator kept up with itself."""
        return not too_slow(self.found, closed_loop=self.setup.closed_loop)

    def as_json(self, *, detailed: bool = False) -> Json:
        """``detailed`` adds vLLM's arrays with an entry for each request."""
        found, whole, setup = self.found, self.found.whole, self.setup
        report: Json = {
            "date": self.started.strftime("%Y%m%d-%H%M%S"),
            "endpoint_type": setup.backend,
            "backend": setup.backend,
            "label": setup.label,
            "model_id": setup.model,
            "tokenizer_id": None,
            "num_prompts": whole.requests,
            "request_rate": setup.rate,
            "burstiness": setup.burstiness,
            "max_concurrency": setup.plan.bounds.max_concurrency,
            "duration": found.duration_s,
            "completed": whole.completed,
            "failed": whole.failed,
            "total_input_tokens": whole.input_tokens,
            "total_output_tokens": whole.output_tokens,
            "request_throughput": found.request_throughput,
            "request_goodput": found.request_goodput,
            "output_throughput": found.output_throughput,
            "total_token_throughput": found.total_token_throughput,
            "max_output_tokens_per_s": found.peak_tokens_per_s,
            "max_concurrent_requests": found.peak_in_flight,
        }
        if detailed:
            report |= _arrays(self.outcome.records)
        for name, spread in whole.latencies.named().items():
            report |= _keys(name, spread)
        return clean(
            {
                **report,
                "kind": "greenroom-load run",
                "format": FORMAT,
                "started": self.started.isoformat(timespec="milliseconds"),
                "setup": setup.as_json(),
                "interrupted": self.outcome.interrupted,
                "trustworthy": self.trustworthy,
                "warnings": self.warnings,
                "samples": {name: spread.n for name, spread in whole.latencies.named().items()},
                "few_samples": [name for name, spread in whole.latencies.named().items() if spread.few],
                "sending_s": found.sending_s,
                "drained_s": found.duration_s - found.sending_s,
                "offered_rate": found.offered_rate,
                "request_throughput_while_sending": found.request_throughput_while_sending,
                "output_throughput_while_sending": found.output_throughput_while_sending,
                "mean_concurrent_requests": found.mean_in_flight,
                "failures": whole.failures,
                "goodput_targets": None if found.goodput is None else found.goodput.given,
                "good_requests": found.good,
                "slo_requests": whole.with_targets,
                "slo_met": whole.met,
                "slo_attainment": whole.attainment,
                "answers_checked": whole.checked,
                "answers_right": whole.right,
                "approximated": whole.approximated,
                "tasks": {task: _group(group) for task, group in found.by_task.items()},
                "client": {
                    "late_sends": found.late,
                    **_keys("lateness", found.lateness),
                    **_keys("loop_lag", found.loop_lag),
                    "cpu_share_of_a_core": found.cpu_share,
                    "gaps_of_zero": found.gaps_of_zero,
                    "replies_without_token_counts": found.tokens_counted,
                    "repeated_prompts": found.repeats,
                },
                "distributions": distributions(self.outcome.records),
                "series": series(self.outcome.records, self.outcome.duration_s),
            }
        )


def as_line(record: Record) -> Json:
    """One request as a line of ``--save-requests``. Times are in seconds since the start, durations in ms."""
    failure = record.failure
    return clean(
        {
            "index": record.index,
            "request_id": record.request_id,
            "task": record.task,
            "prompt": record.prompt_name,
            "ok": record.ok,
            "intended_s": record.intended_s,
            "sent_s": record.sent_s,
            "first_s": record.first_s,
            "end_s": record.end_s,
            "late_ms": _ms(record.late_s),
            "ttft_ms": _ms(record.ttft_s),
            "ttft_intended_ms": _ms(record.ttft_intended_s),
            "tpot_ms": _ms(record.tpot_s),
            "e2el_ms": _ms(record.e2e_s),
            "e2el_intended_ms": _ms(record.e2e_intended_s),
            "itl_ms": [_ms(gap) for gap in record.gaps_s],
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "finish_reason": record.finish,
            "slo": None if record.targets is None else record.targets.given,
            "slo_met": None if record.targets is None else record.met(record.targets),
            "right": record.right,
            "approximated": record.approximated,
            "text": record.text,
            "failure": None
            if failure is None
            else {
                "kind": failure.kind.value,
                "reason": failure.reason,
                "message": failure.message,
                "status": failure.status,
                "retry_after_s": failure.retry_after_s,
            },
        }
    )


def save_requests(records: Iterable[Record], path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(as_line(record), ensure_ascii=False) + "\n")


def save_json(report: Json, path: Path) -> None:
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def check_writable(path: Path | None, option: str) -> None:
    """Raises InvalidConfig for a file whose folder does not exist: better before a run than after it."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise InvalidConfig(option, str(path), "a file in a folder that exists")


def clean(report: Json) -> Json:
    """The same for JSON, which has neither NaN nor infinities: they become None."""
    return {key: _clean(value) for key, value in report.items()}


def _clean(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return clean(value)
    if isinstance(value, list | tuple):
        return [_clean(own) for own in value]
    return value


def _keys(name: str, spread: Spread) -> Json:
    found: Json = {f"mean_{name}_ms": spread.mean, f"median_{name}_ms": spread.median, f"std_{name}_ms": spread.std}
    return found | {f"p{level}_{name}_ms": value for level, value in spread.percentiles.items()}


def _group(group: Group) -> Json:
    found: Json = {
        "requests": group.requests,
        "completed": group.completed,
        "failed": group.failed,
        "failures": dict(group.failures),
        "total_input_tokens": group.input_tokens,
        "total_output_tokens": group.output_tokens,
        "slo_requests": group.with_targets,
        "slo_met": group.met,
        "slo_attainment": group.attainment,
        "answers_checked": group.checked,
        "answers_right": group.right,
        "approximated": group.approximated,
    }
    for name, spread in group.latencies.named().items():
        found |= _keys(name, spread)
    return found


def _arrays(records: Iterable[Record]) -> Json:
    """An entry for each request, failed ones too, in seconds: as vLLM's ``--save-detailed``."""
    own = list(records)
    return {
        "input_lens": [record.prompt_tokens or 0 for record in own],
        "output_lens": [record.output_tokens if record.ok else 0 for record in own],
        "ttfts": [record.ttft_s or 0.0 for record in own],
        "itls": [list(record.gaps_s) for record in own],
        "latencies": [record.e2e_s or 0.0 for record in own],
        "start_times": [record.sent_s for record in own],
        "generated_texts": [record.text for record in own],
        "errors": ["" if record.failure is None else record.failure.label for record in own],
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 4)
