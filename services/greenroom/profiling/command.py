"""From a model and prompts to a folder with its profile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
from tqdm import tqdm

from greenroom.core.errors import GreenroomError, InvalidConfig
from greenroom.core.model_profile import PROFILE_FILE, ModelProfile, dump_model_profile, load_model_profile
from greenroom.profiling.config import ProfileConfig
from greenroom.profiling.folder import KEYWORDS_FILE, OBSERVATIONS_FILE, ROUTING_FILE, written_whole
from greenroom.profiling.measures.correlation import observe
from greenroom.profiling.model.profiled_model import Subject
from greenroom.profiling.profiler import notes_of, profile_model
from greenroom.profiling.prompts import TaskPrompt, TaskPrompts
from greenroom.profiling.reports.correlation_plots import draw
from greenroom.profiling.reports.profile_plots import draw_profile
from greenroom.profiling.reports.profile_text import describe_profile
from greenroom.replay.traces.routing_trace import RoutingTrace
from greenroom.tasktype.evaluate import LabelledPrompt
from greenroom.tasktype.keywords.learn import learn_keywords
from greenroom.worker.model.config import WorkerConfig

log = logging.getLogger(__name__)


def measure(
    worker: WorkerConfig,
    prompts: TaskPrompts,
    config: ProfileConfig,
    folder: Path,
    made_by: Mapping[str, str],
    *,
    plots: bool,
    progress: bool,
    say: Callable[[str], None],
) -> str:
    """Writes ``folder``; returns the text for the terminal. Where anything is raised, the folder stays as it was.

    ``made_by``: the first of the profile's notes. ``say`` gets a description of the model before it is measured.
    """
    with written_whole(folder) as new:
        with Subject(worker) as subject:
            say(subject.describe())
            earlier = _earlier(new / PROFILE_FILE, subject)
            profiled = profile_model(
                subject,
                prompts,
                config,
                partial(tqdm, unit="turn", disable=not progress, smoothing=0.1),
                notes_of(subject, prompts, config, made_by),
                earlier=earlier,
            )
        profile = profiled.profile
        said = []
        if "keywords" in config.stages:
            keywords, lines = _keywords(prompts.labelled, config.seed)
            if keywords is not None:
                (new / KEYWORDS_FILE).write_bytes(keywords)
            else:
                profile = replace_notes(profile, "keywords", lines)
            said.append(lines)
        if "observations" in config.stages:
            profiled.trace.save(new / ROUTING_FILE)
            _write_observations(profiled.trace, new, plots=plots, seed=config.seed)
        (new / PROFILE_FILE).write_bytes(dump_model_profile(profile))
        if plots:
            draw_profile(profile, new)
        names = ", ".join(sorted(path.name for path in new.iterdir()))
    return "\n\n".join([describe_profile(profile), *said, f"{folder}: {names}"])


def observe_trace(path: Path, folder: Path, *, plots: bool, seed: int) -> str:
    """Writes the observations on a recorded trace to ``folder``; returns the text for the terminal.

    Raises TraceError.
    """
    trace = RoutingTrace.load(path)
    with written_whole(folder) as new:
        _write_observations(trace, new, plots=plots, seed=seed)
        names = ", ".join(sorted(one.name for one in new.iterdir()))
    return f"{folder}: {names}"


def _write_observations(trace: RoutingTrace, folder: Path, *, plots: bool, seed: int) -> None:
    observed = observe(trace, seed=seed)
    if plots:
        draw(observed, folder)
    (folder / OBSERVATIONS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(observed.report()), indent=1))


def replace_notes(profile: ModelProfile, name: str, text: str) -> ModelProfile:
    return msgspec.structs.replace(profile, notes={**profile.notes, name: text})


def _earlier(path: Path, subject: Subject) -> ModelProfile | None:
    """The folder's earlier profile, if it has one. Raises InvalidConfig where that is of another model."""
    if not path.is_file():
        return None
    earlier = load_model_profile(path)
    catalogue = subject.catalogue
    own = (catalogue.layers, int(catalogue.experts_per_layer.max()), int(catalogue.top_k.max()))
    if (earlier.layers, earlier.experts, earlier.top_k) != own:
        raise InvalidConfig(
            "output", str(path.parent), f"another folder: this one has a profile of {earlier.model}, another model"
        )
    return earlier


def _keywords(labelled: Sequence[TaskPrompt], seed: int) -> tuple[bytes | None, str]:
    """The file of keywords, with its accuracy; or None, with the reason."""
    try:
        learnt = learn_keywords([LabelledPrompt(one.prompt, one.task_type) for one in labelled], seed=seed)
    except GreenroomError as error:
        return None, f"no keywords: {error}"
    held = learnt.held_out
    size = sum(len(task.keywords) for task in learnt.profile.task_types)
    text = (
        f"{KEYWORDS_FILE}: {size} keywords of {len(learnt.profile.task_types)} types; of {held.prompts} prompts "
        f"that they were not learnt from {held.accuracy:.1%} are told right, {held.unknown:.1%} are unknown"
    )
    return msgspec.json.format(msgspec.json.encode(learnt.profile), indent=1) + b"\n", text
