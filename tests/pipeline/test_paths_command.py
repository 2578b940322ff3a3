"""From recorded routing with tokens to tables of tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from greenroom.core.artifacts.paths_file import PathsFile
from greenroom.replay import RoutingTrace
from tests.paths_files import empty_tables
from tests.pipeline.commands import complaint_of
from tests.pipeline.commands import output_of as run

EXPERTS, TOKENS = 8, 12


def spoken(path: Path, *, seed: int, written: str = "ids") -> str:
    """Token t picks expert t in layer 0 and t + 1 in layer 1. Returns where it is kept."""
    token = np.random.default_rng(seed).integers(TOKENS, size=20 * 40)
    picks = ((token[:, None] + np.arange(2)) % EXPERTS)[..., None].astype(np.uint8)
    starts = np.arange(21) * 40
    RoutingTrace(picks, starts, EXPERTS, token=token if written == "ids" else None, model="spoken").save(path)
    if written == "texts":
        rows = [[f"t{one}" for one in row] for row in token.reshape(20, 40).tolist()]
        lines = [{"prompt": "".join(row[:3]), "decode_tokens": row} for row in rows]
        path.with_suffix(".meta.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_tables_are_fitted_to_traces_and_shown(tmp_path: Path) -> None:
    out = str(tmp_path / "p.safetensors")
    monday, tuesday = (spoken(tmp_path / f"{seed}.npz", seed=seed) for seed in (0, 1))
    said = run("paths", "fit", "--trace", monday, "--trace", tuesday, "--out", out, "--held-out", "0.25")
    assert "fitted to 40 sequences of spoken, 2 layers × 8 experts" in said
    shown = run("paths", "show", out)
    assert "held out, by the token's own table: 100.0%" in shown
    assert "token: 12 rows, 0 left out" in shown
    figures = json.loads(run("paths", "show", out, "--json"))
    assert (figures["form"], figures["vocabulary"], figures["held_out_tokens"]) == ("tables", TOKENS, 400)
    assert figures["recall"]["tokens"] > 0.99
    again = str(tmp_path / "again.safetensors")
    reuse = str(tmp_path / "r.safetensors")
    run("reuse", "fit", "--trace", monday, "--averages-only", "--out", reuse)
    run(
        "paths", "fit", "--trace", monday, "--reuse", reuse, "--vocabulary", "99", "--max-bytes", "1KiB", "--out", again
    )
    small = PathsFile.read(Path(again))
    assert small.vocabulary == 99
    assert sum(small.report["left_out"].values()) > 0


def test_texts_beside_the_trace_are_tokens_too_and_without_tokens_it_says_what_is_missing(tmp_path: Path) -> None:
    out = str(tmp_path / "p.safetensors")
    texts = spoken(tmp_path / "texts.npz", seed=0, written="texts")
    run("paths", "fit", texts, "--out", out, "--seconds", "60")
    assert PathsFile.read(Path(out)).report["recall"]["token"] == 1
    assert "either --prompts" in complaint_of("paths", "fit", "--out", out)
    none = spoken(tmp_path / "none.npz", seed=0, written="nothing")
    said = run("paths", "fit", "--trace", none, "--out", str(tmp_path / "q.safetensors"), status=1)
    assert "an array token, or decode_tokens in a .meta.jsonl beside it" in said
    assert not (tmp_path / "q.safetensors").exists()
    assert "path" in complaint_of("paths", "show", spoken(tmp_path / "t.npz", seed=1))


def test_what_few_sequences_have_is_left_out_where_asked_and_a_vocabulary_that_is_none_is_refused_first(
    tmp_path: Path,
) -> None:
    out, trace = str(tmp_path / "p.safetensors"), spoken(tmp_path / "t.npz", seed=0)
    run("paths", "fit", trace, "--out", out, "--least-sequences", "5", "--seconds", "30")
    report = PathsFile.read(Path(out)).report
    assert report["least_sequences"] == 5
    assert report["rows"]["token"] == TOKENS
    assert report["left_out"]["triple"] > 0
    assert "16777216" in complaint_of("paths", "fit", trace, "--out", out, "--vocabulary", str(2**24 + 1))


def test_a_t5_is_fitted_with_the_prompts_beside_the_trace_and_the_better_of_both_is_kept(tmp_path: Path) -> None:
    out = str(tmp_path / "p.safetensors")
    texts = spoken(tmp_path / "texts.npz", seed=0, written="texts")
    reuse = str(tmp_path / "r.safetensors")
    run("reuse", "fit", "--trace", texts, "--averages-only", "--out", reuse)
    both = ("--trace", texts, "--reuse", reuse, "--held-out", "0.25", "--out", out)
    run("paths", "fit", "--form", "t5", *both)
    found = PathsFile.read(Path(out))
    assert found.form == "t5"
    assert found.numbered_texts
    assert found.report["recall"]["alone"] > 0.9
    assert "held out, by the network: " in run("paths", "show", out)
    run("paths", "fit", "--form", "best", *both)
    figures = json.loads(run("paths", "show", out, "--json"))
    assert max(figures["recall"].values()) >= max(figures["other_recall"].values())
    assert {figures["form"], figures["other"]} == {"tables", "t5"}
    assert f"the other form, {figures['other']}, foresees by" in run("paths", "show", out)


@pytest.mark.parametrize(
    "report",
    [
        {"rows": {"token": 1}},
        {"rows": [], "left_out": 3, "recall": None},
        {"rows": {"token": "a"}, "left_out": {"token": None}, "recall": {"crystal_ball": 0.5, "token": "a"}},
        {"recall": {"token": 10**400, "past": float("nan")}, "other_recall": {"x": 1}, "model": "told"},
    ],
)
def test_whatever_is_reported_is_shown(tmp_path: Path, report: dict[str, Any]) -> None:
    file = replace(empty_tables((4, 3)), report=report, model="m")
    file.write(tmp_path / "p.safetensors")
    assert "of m, 2 layers" in run("paths", "show", str(tmp_path / "p.safetensors"))
    assert json.loads(run("paths", "show", str(tmp_path / "p.safetensors"), "--json"))["model"] == "m"


def test_a_file_of_numbered_texts_says_what_it_is_for_and_the_trace_without_tokens_is_named(tmp_path: Path) -> None:
    out, reuse = str(tmp_path / "p.safetensors"), str(tmp_path / "r.safetensors")
    texts, others = (spoken(tmp_path / f"{seed}.npz", seed=seed, written="texts") for seed in (0, 1))
    ids, none = spoken(tmp_path / "ids.npz", seed=0), spoken(tmp_path / "none.npz", seed=0, written="nothing")
    run("reuse", "fit", "--trace", texts, "--averages-only", "--out", reuse)
    fit = ("paths", "fit", "--reuse", reuse, "--out", out, "--trace")
    only, alone = "of numbered texts: for replays of the trace that it was made of only", "of none of them alone"
    said = run(*fit, texts)
    assert only in said
    assert alone not in said
    assert only in run("paths", "show", out)
    said = run(*fit, others, "--trace", texts)
    assert alone not in said, "the first has all texts, so the numbers are its own"
    rare = spoken(tmp_path / "rare.npz", seed=2, written="texts")
    meta = (tmp_path / "rare.meta.jsonl").read_text()
    (tmp_path / "rare.meta.jsonl").write_text(meta.replace('"t3"', '"u3"'))
    assert alone in run(*fit, texts, "--trace", rare)
    assert only not in run(*fit, ids)
    said = run(*fit, ids, "--trace", none, status=1)
    assert "none.npz, one without tokens" in said
