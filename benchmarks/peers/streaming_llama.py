"""BigMoeOnEdge: llama.cpp that reads the picked experts from disk into a bounded cache, past the page cache.

It decodes one sequence, takes text and picks its tokens itself. So what it picks, by its own sampler with a seed, is
what the other arms are given (``spelled_tokens``). Runs within a child process, which starts ``bmoe-cli`` for each
batch: both are in the arm's cgroup. Standard library only.
"""

from __future__ import annotations

import csv
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.harness.children.process_memory import anonymous_bytes_of, memory
from benchmarks.harness.inputs.spelled_tokens import spelled, tokens_of
from benchmarks.peers.batch import Batch, Decoded, batch_of

ARCHITECTURE = "llama"
"""What a Mixtral is to llama.cpp."""
SEED = 11
SAMPLED = ("--temp", "1", "--top-k", "0", "--top-p", "1", "--seed", str(SEED))
"""Routing as random as the model's answers. Greedy answers of random weights soon go in circles."""
_TIMEOUT_S = 300.0
_POLL_S = 0.01
_ERROR_CHARACTERS = 400
_MIB = 2**20


class StreamingFailed(Exception):
    """The program said no, or something else than what was understood."""


@dataclass(frozen=True)
class Told:
    """What one run said of itself. Bytes.

    ``cache_bytes``: of the experts that it kept, at the end.
    """

    decoded: Decoded
    load_s: float
    hit_rate: float | None
    peak_rss: int
    cache_bytes: int


class StreamingLlama:
    """``settings``: ``binary``, ``flags`` and ``sampling`` of it."""

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        self._start = [settings["binary"], "--model", model, *settings["flags"], *settings["sampling"]]

    def describe(self) -> dict[str, Any]:
        return {}

    def decode(self, batches: list[dict[str, Any]]) -> dict[str, Any]:
        """One batch after the other, each by a program of its own. The figures beside are of the last."""
        runs = [self._run(batch_of(batch)) for batch in batches]
        last, allocated = runs[-1]
        beside = memory()["rss"] + Path(self._start[0]).stat().st_size
        return {
            "batches": [asdict(run.decoded) for run, _ in runs],
            "load_s": last.load_s,
            "hit_rate": last.hit_rate,
            "peak_rss": last.peak_rss,
            "own_bytes": allocated - last.cache_bytes + beside,
        }

    def close(self) -> None:
        pass

    def _run(self, batch: Batch) -> tuple[Told, int]:
        """Also the most that the program had allocated. Prompts take more than its cache's bound: all that a layer
        picks is there at once."""
        if batch.sequences != 1:
            raise StreamingFailed(f"it decodes one sequence, not {batch.sequences}")
        (prompt,), (forced,) = batch.prompts, batch.forced
        with tempfile.TemporaryDirectory() as folder:
            table = Path(folder) / "steps.csv"
            command = [*self._start, "--n-predict", str(len(forced)), "--csv", str(table), "--prompt", spelled(prompt)]
            with (Path(folder) / "answer").open("w+") as answer, (Path(folder) / "log").open("w+") as log:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=answer, stderr=log)
                allocated = _watched(process)
                answer.seek(0)
                log.seek(0)
                text, said = answer.read(), log.read()
            if process.returncode:
                raise StreamingFailed(f"it ended with {process.returncode}: {said.strip()[-_ERROR_CHARACTERS:]}")
            return told_of(text, table.read_text(), prompt, len(forced)), allocated


def _watched(process: subprocess.Popen[bytes]) -> int:
    """Wait for its end; the most that it had allocated meanwhile. Raises StreamingFailed where it takes too long."""
    most, deadline = 0, time.monotonic() + _TIMEOUT_S
    while True:
        most = max(most, anonymous_bytes_of(process.pid))
        try:
            process.wait(_POLL_S)
            return most
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                process.kill()
                process.wait()
                raise StreamingFailed(f"it did not end within {_TIMEOUT_S:.0f} s") from None


def told_of(text: str, table: str, prompt: Sequence[int], tokens: int) -> Told:
    """What it printed and the table that it wrote. Raises StreamingFailed.

    A line of the table is the step that follows a token: the token after it comes with that step's end. What lies
    between two steps (sampling, the table itself) is not counted, as in its own rate.
    """
    answer, _, _ = text.partition("\n\n")
    try:
        found = tokens_of(answer)
    except ValueError as error:
        raise StreamingFailed(f"its answer is {error}") from error
    if found[: len(prompt)] != tuple(prompt):
        raise StreamingFailed("its answer does not begin with the prompt")
    picked = found[len(prompt) :]
    if len(picked) != tokens:
        raise StreamingFailed(f"it gave {len(picked)} tokens, not {tokens}: the text's end was one of them")
    lines = [line for line in table.splitlines() if not line.startswith("#")]
    steps = list(csv.DictReader(lines))
    said = _summary(table)
    if len(steps) != tokens or said.get("n_prompt") != len(prompt):
        raise StreamingFailed(f"its table has {len(steps)} steps and a prompt of {said.get('n_prompt')} tokens")
    try:
        return _told(steps, said, picked)
    except (KeyError, ValueError) as error:
        raise StreamingFailed(f"its table is not as expected: {error}") from error


def _told(steps: Sequence[Mapping[str, str]], said: Mapping[str, float], picked: tuple[int, ...]) -> Told:
    walls = [float(step["wall_ms"]) / 1000 for step in steps[:-1]]
    arrivals = tuple(accumulate([said["prefill_s"], *walls]))
    read = sum(int(step["read_bytes"]) for step in steps[:-1])
    hits = said["cache_hit_pct"]
    return Told(
        Decoded((arrivals,), (picked,), read),
        load_s=said["load_s"],
        hit_rate=hits / 100 if hits >= 0 else None,
        peak_rss=int(max(float(step["rss_mib"]) for step in steps) * _MIB),
        cache_bytes=int(said["cache_resident_MiB"] * _MIB),
    )


def _summary(table: str) -> dict[str, float]:
    """The numbers of its last line, ``# summary name=number ...``."""
    lines = [line for line in table.splitlines() if line.startswith("# summary ")]
    pairs = (word.partition("=") for line in lines[-1:] for word in line.removeprefix("# summary ").split())
    return {name: float(value) for name, _, value in pairs}


def why_not(binary: str) -> str | None:
    """None where the program is there and streams the benchmark's models, else the reason."""
    try:
        known = subprocess.run([binary, "--list-archs"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"{binary} does not run: {error}"
    if ARCHITECTURE not in known.split():
        return f"{binary} streams no experts of the architecture {ARCHITECTURE}: its registry lacks a row for it"
    return None


def version_of(binary: str) -> str:
    return subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout.strip()
