"""The report: vLLM's keys, a table that can not be misread, pictures."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from greenroom.core.errors import InvalidConfig
from greenroom_load.plot import PlotUnavailable, check_plots, draw
from greenroom_load.reply_record import FailureKind, Record
from greenroom_load.report import Report, as_line, check_writable, save_json, save_requests
from greenroom_load.run_setup import Setup, without_secrets
from greenroom_load.runner import Outcome
from greenroom_load.sweep import Rule, Step, Sweep
from greenroom_load.table import as_text
from greenroom_load.targets import Targets
from greenroom_load.transport import Style
from tests.unit.loadgen.fakes import FakeServer, failed, outcome, plan, record

#: What `vllm bench serve --save-result` writes for a text model, with and without --save-detailed.
VLLM_KEYS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput",
    "max_output_tokens_per_s", "max_concurrent_requests",
    *(f"{statistic}_{name}_ms" for statistic in ("mean", "median", "std", "p99")
      for name in ("ttft", "tpot", "itl", "e2el")),
}  # fmt: skip
VLLM_ARRAYS = {"input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "generated_texts", "errors"}


def report(result: Outcome, goodput: Targets | None = None, *, seed: int = 0, command: tuple[str, ...] = ()) -> Report:
    style = Style(api_key="secret-key", headers={"X-Token": "secret-header"})
    setup = Setup.of(plan(seed=seed), style, FakeServer(), "the-model", command or ("run", "--seed", "0"), None)
    return Report.of(setup, result, goodput)


def many(count: int = 150, **given: Any) -> list[Record]:
    return [record(n, at=n * 0.1, **given) for n in range(count)]


def test_the_json_has_vllms_keys_and_is_json() -> None:
    found = report(outcome(*many()), Targets(ttft_ms=200)).as_json()
    detailed = report(outcome(*many(), failed(150))).as_json(detailed=True)

    assert found.keys() >= VLLM_KEYS
    assert detailed.keys() - found.keys() == VLLM_ARRAYS
    assert {len(detailed[name]) for name in VLLM_ARRAYS} == {151}
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["completed"], found["num_prompts"], found["mean_itl_ms"]) == (150, 150, pytest.approx(20))
    assert found["samples"]["itl"] == 450


def test_what_was_not_measured_is_null_rather_than_0() -> None:
    found = report(outcome(failed(0))).as_json()

    assert found["mean_ttft_ms"] is None
    assert found["request_goodput"] is None
    assert found["completed"] == 0
    json.dumps(found, allow_nan=False)


def test_it_says_what_was_run() -> None:
    whole = report(outcome(*many()), seed=11, command=("run", "--seed", "11", "--api-key", "secret-key"))
    setup = whole.as_json()["setup"]
    text = as_text(whole)

    assert setup["command"] == ["greenroom-load", "run", "--seed", "11", "--api-key", "***"]
    assert (setup["seed"], setup["model"], setup["url"], setup["loop"]) == (11, "the-model", "fake://here", "open")
    for part in ("the-model", "fake://here", "seed 11", "constant, 100/s", "question 1", "fixed:8", "open loop",
                 "greenroom-load run --seed 11 --api-key '***'", "2023-11-14 22:13:20 UTC"):  # fmt: skip
        assert part in text
    assert "secret" not in json.dumps(whole.as_json()) + text


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["--api-key", "k", "x"], ["--api-key", "***", "x"]),
        (["--api-key=k"], ["--api-key=***"]),
        (["--header", "A: b", "--header=C: d", "--seed", "1"], ["--header", "***", "--header=***", "--seed", "1"]),
        (["--label", "--api-key=x"], ["--label", "--api-key=***"]),
    ],
)
def test_secrets_are_blotted_out(given: list[str], shown: list[str]) -> None:
    assert without_secrets(given) == shown


def test_percentiles_of_few_samples_are_marked() -> None:
    few, enough = report(outcome(*many(20))), report(outcome(*many(100)))

    assert "* are of fewer than 100 samples (ttft, tpot" in as_text(few)
    assert few.as_json()["few_samples"] == ["ttft", "tpot", "itl", "e2el", "ttft_intended", "e2el_intended"]
    ttft = next(line for line in as_text(few).splitlines() if line.startswith("TTFT "))
    assert ttft.count("*") == 3
    assert "*" not in as_text(enough).replace("'***'", "")
    assert enough.as_json()["few_samples"] == []


def test_the_table_has_tasks_failures_goodput_and_answers() -> None:
    slo = Targets(ttft_ms=200)
    records = [
        *(record(n, targets=slo, expected="yes") for n in range(3)),
        record(3, task="compare", expected="no"),
        failed(4, FailureKind.LIMITED, "saturated", task="compare"),
    ]
    text = as_text(report(outcome(*records), Targets(ttft_ms=200)))
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}

    assert "4 of 5 with ttft ≤ 200 ms" in text
    assert "1  429: saturated" in text
    assert "3 of 4 checked are right (75.0%)" in text
    assert "100.0%" in lines["question"]
    assert lines["question"].endswith("3/3")
    assert lines["compare"].endswith("0/1")
    assert "! 1 of 5 requests failed" in text


def test_what_was_approximated_is_in_the_table_where_something_was() -> None:
    near, exact = (report(outcome(record(0, approximated=share))) for share in (0.125, 0.0))
    assert "routing   12.50% approximated" in as_text(near)
    assert "approximated" not in as_text(exact)
    assert [found.as_json()["approximated"] for found in (near, exact)] == [0.125, 0.0]
    assert near.as_json()["tasks"]["question"]["approximated"] == 0.125
    assert as_line(record(0, approximated=0.125))["approximated"] == 0.125


def test_a_line_for_each_request(tmp_path: Path) -> None:
    records = [record(0, targets=Targets(ttft_ms=50), expected="yes"), failed(1)]
    save_requests(records, tmp_path / "r.jsonl")
    first, second = (json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines())

    assert first["ok"]
    assert first["ttft_ms"] == pytest.approx(100)
    assert first["itl_ms"] == pytest.approx([20, 20, 20])
    assert (first["slo_met"], first["right"], first["text"]) == (False, True, "yes")
    assert second["failure"]["reason"] == "saturated"
    assert second["ttft_ms"] is None
    assert as_line(records[0]).keys() == as_line(records[1]).keys()


def test_a_file_that_can_not_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    check_writable(tmp_path / "new.json", "json")
    check_writable(None, "json")
    for path in (tmp_path, tmp_path / "no" / "folder.json"):
        with pytest.raises(InvalidConfig, match="json"):
            check_writable(path, "json")


def a_sweep(*, goodput: Targets | None = None) -> Sweep:
    steps = []
    for rate in (1.0, 2.0, 4.0):
        behind = 0.1 if rate < 4 else 1.0
        records = [
            record(n, at=n / rate, first_s=n / rate * (1 + behind) + 0.1, end_s=n / rate * (1 + behind) + 0.3)
            for n in range(int(30 * rate))
        ]
        step = report(outcome(*records), goodput)
        steps.append(Step(rate, step, tuple(Rule(least_finished=0.8, least_good=0).broken(step.found))))
    return Sweep(tuple(steps), Rule(), searched=False)


def test_a_sweep_names_the_highest_sustained_rate_and_its_rule() -> None:
    sweep = a_sweep()
    found = sweep.as_json()

    assert [step["sustained"] for step in found["steps"]] == [True, True, False]
    assert found["saturating_rate"] == 2.0
    assert found["saturation_seen"]
    assert "at most 1% failed" in found["rule"]
    assert found["steps"][0]["result"].keys() >= VLLM_KEYS
    json.dumps(found, allow_nan=False)
    assert "highest sustained rate: 2 requests/s\n" in sweep.as_text() + "\n"
    only_good = replace(sweep, steps=sweep.steps[:2])
    assert "the true one may be higher" in only_good.as_text()
    none_good = replace(sweep, steps=sweep.steps[2:])
    assert none_good.as_json()["saturating_rate"] is None
    assert "no rate was sustained" in none_good.as_text()


def test_pictures_are_drawn_of_runs_and_sweeps(tmp_path: Path) -> None:
    run = report(outcome(*many(), failed(150))).as_json()
    one_token = report(outcome(*many(5, output_tokens=1, gaps_s=()))).as_json()
    sweep = a_sweep(goodput=Targets(ttft_ms=500)).as_json()
    save_json(run, tmp_path / "run.json")
    again = json.loads((tmp_path / "run.json").read_text())

    drawn = draw({"one": again, "two": one_token, "sweep": sweep}, tmp_path / "load")

    assert [path.name for path in drawn] == ["load-latency.png", "load-time.png", "load-rate.png"]
    for path in drawn:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 10_000
    assert draw({"one": run}, tmp_path / "v", kind="svg")[0].read_text().startswith("<?xml")


def test_what_can_not_be_drawn_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlotUnavailable, match="there is no folder"):
        check_plots(tmp_path / "no" / "load")
    with pytest.raises(PlotUnavailable, match="nothing to draw"):
        draw({}, tmp_path / "load")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotUnavailable, match=r"greenroom\[plot\]"):
        check_plots(tmp_path / "load")
