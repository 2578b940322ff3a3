"""greenroom beside llama.cpp and, if it is there, BigMoeOnEdge, on the same checkpoints and the same token streams.

Resident, and with a third of the experts in memory. There each arm has a memory cgroup with the same bytes for experts,
beside what the arm needs itself. Every arm is a process of its own; they take turns in every round. llama.cpp has the
settings that were fastest in trials on this machine just before. Prints a table, writes a plot and, as the last line,
prints one JSON object.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click

from benchmarks.harness.children.cgroups import remove_stale, why_not
from benchmarks.harness.children.greenroom_child import parse_policy
from benchmarks.harness.children.processes import exit_on_sigterm
from benchmarks.harness.disk import ReadAhead
from benchmarks.harness.inputs.checkpoints import widened
from benchmarks.harness.inputs.gguf_models import GGUF_KINDS, random_gguf, small_or_large_mixtral
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.results import write_result
from benchmarks.peers import streaming_llama as streaming
from benchmarks.peers.arms import greenroom, llama_cpp, streaming_llama
from benchmarks.peers.forced_tokens import conversations, random_tokens
from benchmarks.peers.measurement import MAX_MODEL_LEN, Effort, Measurement, Subject, agreements, runs_of
from benchmarks.peers.rate_plot import plot
from benchmarks.peers.results import RESIDENT, STREAMING, THIRD, streaming_summary, summary
from benchmarks.peers.streaming_peer import StreamingPeer
from benchmarks.peers.tables import print_aims, print_memory, print_table
from greenroom.checkpoints.pack_cache import default_cache_dir
from greenroom.core.errors import InvalidConfig

PLAIN = ("random", "widened")
"""Checkpoints in bf16."""
GGUF = tuple(f"random_{kind}" for kind in GGUF_KINDS)
"""One GGUF file for both engines."""
MODELS = (*PLAIN, *GGUF)
LEAST_AGREEMENT = 0.5
"""Rounding alone moves a random model's near ties: with bf16 activations it agrees with itself in fp32 three times in
four. Wrong weights agree as seldom as chance has it.
"""
_QUICK = Effort(
    rounds=1, trials=1, skip=1, prompt_tokens=8, tune=False,
    tokens={(RESIDENT, 1): 8, (RESIDENT, 8): 5, (THIRD, 1): 8, (THIRD, 8): 5},
    trial_tokens={(RESIDENT, 1): 5, (RESIDENT, 8): 4, (THIRD, 1): 5, (THIRD, 8): 4},
)  # fmt: skip
_EPILOG = """\b
Examples:
  make bench-peers
  python -m benchmarks.peers --quick
  python -m benchmarks.peers --model widened --policy look-ahead:layers=2 --rounds 5
  python -m benchmarks.peers --model random_q4_k_m --streaming-llama ~/BigMoeOnEdge/build/cli/bmoe-cli
"""


@click.command(epilog=_EPILOG)
@click.option("--python", "peer_python", default=".venv-peers/bin/python", show_default=True,
              help="The interpreter that has llama-cpp-python.")  # fmt: skip
@click.option("--model", "models", multiple=True, type=click.Choice(MODELS), default=MODELS, show_default=True)
@click.option("--rounds", type=click.IntRange(1), help="Measured rounds.  [default: 3, quick: 1]")
@click.option("--policy", default="look-ahead", show_default=True, metavar="NAME[:OPTION=VALUE,...]",
              help="greenroom's expert policy.")  # fmt: skip
@click.option("--expert-memory", default="33%", show_default=True, help="greenroom's budget where memory is short.")
@click.option("--threads", type=click.IntRange(1), default=len(os.sched_getaffinity(0)), show_default="all cores")
@click.option("--trials/--no-trials", "tune", default=None, help="Whether to look for the peers' best settings first.")
@click.option("--streaming-llama", "streaming_binary", metavar="PATH",
              help="The bmoe-cli of BigMoeOnEdge, measured beside on GGUF files; see docs/benchmarks.md.")  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("artifacts/bench-peers"),
              show_default=True, help="Folder for the plot (peers.png) and the result (peers.json).")  # fmt: skip
@click.option("--quick", is_flag=True, help="Small models, one round, no trials: to see that it works, not how fast.")
def main(
    peer_python: str, models: tuple[str, ...], rounds: int | None, policy: str, expert_memory: str, threads: int,
    tune: bool | None, streaming_binary: str | None, out: Path, quick: bool,
) -> None:  # fmt: skip
    """Measure greenroom beside llama.cpp and print a table, a plot's path and one JSON object."""
    try:
        parse_policy(policy)
    except InvalidConfig as error:
        raise click.BadParameter(str(error), param_hint="--policy") from error
    effort = _QUICK if quick else Effort()
    effort = replace(effort, rounds=rounds or effort.rounds, tune=effort.tune if tune is None else tune)
    _must_have_llama_cpp(peer_python)
    streaming_peer = None if streaming_binary is None else _streaming_peer(streaming_binary, threads)
    exit_on_sigterm()
    remove_stale()
    no_cgroup = why_not()
    if no_cgroup is not None:
        print(f"no memory cgroup can be made here, so llama.cpp is measured resident only: {no_cgroup}")
    subjects = [_subject(name, effort, quick) for name in models]
    cache = default_cache_dir()
    read_ahead = ReadAhead(cache)
    print(_conditions(read_ahead, threads))
    with progress(runs_of(subjects, effort, streaming_peer), "bench-peers") as bar:
        measurement = Measurement(
            greenroom(), llama_cpp(peer_python), effort, policy=policy, expert_memory=expert_memory, threads=threads,
            cgroups=no_cgroup is None, read_ahead=read_ahead, bar=bar, streaming=streaming_peer,
        )  # fmt: skip
        for subject in subjects:
            measurement.prepare(subject)
        for number in range(effort.rounds):
            measurement.round(subjects, number)
    rows = sorted(measurement.rows.values(), key=lambda row: (models.index(row.model), row.memory, row.sequences))
    print(f"llama.cpp: llama-cpp-python {measurement.peer_version.get('version', 'not known')}")
    for subject in subjects:
        for sequences in (1, 8):
            chosen = [subject.resident.get(sequences), subject.short_of_memory.get(sequences)]
            told = "; at a third: ".join(settings.describe() for settings in chosen if settings is not None)
            print(f"  {subject.name}, {sequences} at once: {told}")
    for subject in subjects:
        if subject.streaming is not None:
            print(f"{STREAMING}: {subject.name}: {subject.streaming.describe()}")
    print_table(rows)
    print_memory(rows)
    found = summary(rows, [name for name in models if name in PLAIN])
    found |= {f"gguf_{key}": value for key, value in summary(rows, [name for name in models if name in GGUF]).items()}
    found |= streaming_summary(rows, [name for name in models if name in GGUF])
    print_aims(found)
    agreed = agreements(subjects)
    for name, share in agreed.items():
        print(f"{name}: both engines would have picked the same token at {share:.1%} of the forced positions")
        if share < LEAST_AGREEMENT:
            print(f"{name}: that is too seldom for the same weights; its figures compare nothing")
    answer = {
        **found,
        "agreement": agreed,
        "streaming_agreement": {
            subject.name: subject.streaming_agreement for subject in subjects if subject.streaming is not None
        },
        "llama_cpp": measurement.peer_version,
        "streaming_llama": None if streaming_binary is None else streaming.version_of(streaming_binary),
        "policy": policy,
        "read_ahead_kb": {"device": read_ahead.device, "original": read_ahead.original},
        "no_cgroup": no_cgroup,
        "machine": describe_machine(cache),
        "threads": threads,
        "rounds": effort.rounds,
        "quick": quick,
        "failures": measurement.failures,
        "trials": measurement.trials,
        "rows": [row.as_json() for row in rows],
    }
    out.mkdir(parents=True, exist_ok=True)
    try:
        plot(rows, out / "peers.png")
        print(f"plot: {out / 'peers.png'}")
    except Exception as error:  # what was measured is worth more than its picture
        print(f"no plot: {error}", file=sys.stderr)
    print(write_result(answer, out / "peers.json"))


def _must_have_llama_cpp(python: str) -> None:
    """Raises UsageError, before anything that takes long."""
    try:
        subprocess.run([python, "-c", "import llama_cpp"], check=True, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as error:
        told = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise click.UsageError(f"{python} has no llama-cpp-python; `make bench-peers` builds it: {told[-1]}") from error


def _streaming_peer(binary: str, threads: int) -> StreamingPeer:
    """Raises UsageError, before anything that takes long."""
    reason = streaming.why_not(binary)
    if reason is not None:
        raise click.UsageError(f"--streaming-llama: {reason}")
    return StreamingPeer(streaming_llama(), binary, threads, MAX_MODEL_LEN)


def _subject(name: str, effort: Effort, quick: bool) -> Subject:
    tokens = max(effort.tokens.values())
    if name == "widened":
        checkpoint = widened(0.5) if quick else widened()
        return Subject(
            name, checkpoint, conversations(checkpoint, 8, prompt_tokens=effort.prompt_tokens, tokens=tokens)
        )
    plain = small_or_large_mixtral(quick)
    checkpoint = plain if name == "random" else random_gguf(name.removeprefix("random_"), quick)
    return Subject(name, checkpoint, random_tokens(plain, 8, prompt_tokens=effort.prompt_tokens, tokens=tokens))


def _conditions(read_ahead: ReadAhead, threads: int) -> str:
    where = f"{read_ahead.device}, read_ahead_kb {read_ahead.original}"
    settable = "" if read_ahead.settable else " (can not be set here, so llama.cpp gets no other)"
    return f"{threads} threads; the models lie on {where}{settable}"


if __name__ == "__main__":
    main()
