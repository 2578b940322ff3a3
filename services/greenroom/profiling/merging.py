"""What a profile keeps of an earlier one of the same model."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from greenroom.core.model_profile import ModelProfile, TaskProfile

EARLIER = "earlier command"
"""Among the notes: what made the rest."""


def merged(new: ModelProfile, earlier: ModelProfile, stages: Collection[str]) -> ModelProfile:
    """``new``, completed from ``earlier`` by what the chosen ``stages`` did not measure.

    Lengths, popularity and the set of tasks are those of ``new`` where ``lengths`` was chosen. Otherwise they are those
    of ``earlier``, with the tasks that only ``new`` has.
    """
    tasks: dict[str, TaskProfile] = dict(new.tasks if "lengths" in stages else earlier.tasks)
    for name, task in new.tasks.items():
        before = earlier.tasks.get(name, task)
        kept = task if "lengths" in stages else before
        tasks[name] = msgspec.structs.replace(
            kept,
            sensitivity=task.sensitivity or before.sensitivity,
            pick_worth=task.pick_worth or before.pick_worth,
        )
    notes = {**earlier.notes, **new.notes}
    if "command" in earlier.notes:
        notes[EARLIER] = earlier.notes["command"]
    return msgspec.structs.replace(
        new, tasks=tasks, costs=new.costs or earlier.costs, reuse=new.reuse or earlier.reuse, notes=notes
    )
