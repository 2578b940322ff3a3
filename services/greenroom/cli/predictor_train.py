"""``greenroom predictor-train``: an expert predictor from a recorded trace."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from greenroom.cli.numbers import SEED
from greenroom.core.artifacts.forecast_kinds import EMOE_A, EMOE_L
from greenroom.core.errors import InvalidConfig
from greenroom.core.files import write_whole

if TYPE_CHECKING:
    from greenroom.predictor.judging.scores import Score
    from greenroom.predictor.kinds.emoe.artifact import LearnedArtifact
    from greenroom.predictor.versions.store import VersionStore


@click.command("predictor-train")
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--kind",
    type=click.Choice([EMOE_A, EMOE_L]),
    default=EMOE_A,
    show_default=True,
    help="All layers at once from the previous prompt's, or layer by layer from its own prediction.",
)
@click.option(
    "--learn-model",
    type=click.Choice(["xlnet", "gpt2", "bert"]),
    default="xlnet",
    show_default=True,
    help="What learns.",
)
@click.option(
    "--tasks",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON Lines with the task type of each sequence as `task`, `task_type` or `category`.  "
    "[default: what the trace says, or NAME.meta.jsonl beside it]",
)
@click.option("--width", type=int, default=0, show_default=True, help="Of its layers; 0: what suits the model.")
@click.option("--epochs", type=int, default=60, show_default=True, help="At most; it stops when it gains nothing more.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="The same seed learns the same.")
@click.option("--model-name", help="The model as services call it.  [default: as the trace has it]")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the predictor here, a safetensors file."
)
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep it as the next version of a `greenroom predictor` that does not run now.",
)
@click.option("--keep", type=click.IntRange(min=1), default=5, show_default=True, help="Versions that are kept there.")
@click.option("--json", "as_json", is_flag=True, help="The report as one JSON object.")
def predictor_train(
    trace: Path,
    kind: str,
    learn_model: str,
    tasks: Path | None,
    width: int,
    epochs: int,
    seed: int,
    model_name: str | None,
    out: Path | None,
    state_dir: Path | None,
    keep: int,
    as_json: bool,
) -> None:
    """Train an expert predictor from a recorded TRACE and say how well it does.

    The first four fifths of the prompts are learnt from, the others measured on, beside predictors that need no
    learning. `greenroom trace` records traces.

    \b
    Examples:
      greenroom predictor-train understudy.npz
      greenroom predictor-train t.npz --tasks t.meta.jsonl --kind emoe-l --out emoe-l.safetensors
      greenroom predictor-train t.npz --state-dir ./predictor --model-name olmoe
    """
    from greenroom.predictor.kinds.emoe.config import TrainingConfig
    from greenroom.predictor.kinds.emoe.recorded import read_recorded

    if out is not None:
        _check_out(out)
    config = TrainingConfig(kind=kind, backbone=learn_model, width=width, epochs=epochs, seed=seed)
    recorded = read_recorded(trace, tasks)
    model = model_name or recorded.trace.model
    if state_dir is not None and not model:
        raise InvalidConfig("model-name", model, "the trace names no model: say which one it is of")

    with ExitStack() as held:
        # What can be refused before an hour of training, is; what torch is not needed for, before torch is loaded.
        store = None if state_dir is None else held.enter_context(_opened(state_dir, keep, kind))

        from tqdm import tqdm

        from greenroom.predictor.judging.gate import why_withheld
        from greenroom.predictor.kinds.emoe.comparison import places_to_test, trivial
        from greenroom.predictor.kinds.emoe.training import measure, split, train

        with tqdm(total=config.epochs, desc="training", unit="epoch", disable=not sys.stderr.isatty()) as bar:

            def told(epoch: int, loss: float) -> None:
                bar.update()
                bar.set_postfix(loss=f"{loss:.4f}")

            artifact = train(recorded.sequences, config, model=model, on_epoch=told)
        begin = split(recorded.sequences, config).train
        places = places_to_test(recorded.sequences, begin)
        scores: dict[str, Score] = {}
        if len(places):
            scores = trivial(recorded, begin, places)
            scores[f"learned: {learn_model} {kind}"] = measure(artifact, recorded.sequences, places)
        if as_json:
            rows = {name: one.as_json() for name, one in scores.items()}
            click.echo(json.dumps({"report": artifact.report, "test_sequences": len(places), "scores": rows}))
        else:
            click.echo(_table(scores, artifact, len(places)))
        if worse := why_withheld(artifact.report, 0.0):
            click.echo(f"A service would not need it: {worse}.", err=True)
        # Behind the report, which is then seen wherever it can not be kept, and each whatever became of the other.
        try:
            if out is not None:
                _write(out, artifact)
                _say(f"written to {out}", as_json)
        finally:
            if store is not None and state_dir is not None:
                version = _keep(store, state_dir, artifact)
                _say(f"{kind} of {model}: version {version} in {state_dir}", as_json)


def _check_out(out: Path) -> None:
    """By a file beside it, since rights do not say all: of a read-only file system nothing."""
    try:
        tempfile.TemporaryFile(dir=out.parent).close()
    except FileNotFoundError:
        raise click.BadParameter(f"there is no folder {out.parent}", param_hint="--out") from None
    except OSError as error:
        raise _not_written("out", out, error) from error


@contextmanager
def _opened(state_dir: Path, keep: int, kind: str) -> Iterator[VersionStore[LearnedArtifact]]:
    """No service takes the folder before the result is in it. Raises InvalidConfig."""
    from greenroom.predictor.kinds.emoe.artifact import codec_of
    from greenroom.predictor.versions.store import FileStore

    store = FileStore(state_dir, keep, codec_of(kind), within=kind)
    store.open()
    try:
        yield store
    finally:
        store.close()


def _write(out: Path, artifact: LearnedArtifact) -> None:
    from greenroom.predictor.kinds.emoe.artifact import dump_learned

    try:
        write_whole(out, dump_learned(artifact.as_version(1, _now_ms())))
    except OSError as error:
        raise _not_written("out", out, error) from error


def _keep(store: VersionStore[LearnedArtifact], state_dir: Path, artifact: LearnedArtifact) -> int:
    version = store.next_version(artifact.model)
    try:
        return store.write(artifact.as_version(version, _now_ms())).version
    except OSError as error:
        raise _not_written("state-dir", state_dir, error) from error


def _not_written(field: str, path: Path, error: OSError) -> InvalidConfig:
    return InvalidConfig(field, str(path), f"it must be a place that can be written: {error.strerror}")


def _now_ms() -> int:
    return round(time.time() * 1000)


def _say(text: str, as_json: bool) -> None:
    """Beside the JSON, which is alone on stdout."""
    click.echo(text, err=as_json)


def _table(scores: dict[str, Score], artifact: LearnedArtifact, prompts: int) -> str:
    report = artifact.report
    lines = [
        f"{artifact.sequences} sequences learnt from, {report['epochs']} epochs, {report['seconds']} s, "
        f"{artifact.nbytes} bytes; measured on {prompts} prompts that it has not seen",
        f"{'':34} {'right':>7} {'F1':>7} {'overlap':>8}   picks within 20/40/60/80 % of experts",
    ]
    for name, one in scores.items():
        within = " ".join(f"{share:.3f}" for share in one.coverage.values())
        lines.append(f"{name:34} {one.accuracy:7.4f} {one.f1:7.4f} {one.overlap:8.4f}   {within}")
    return "\n".join(lines)
