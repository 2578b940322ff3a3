"""The bundled model's routing, recorded now. Widening leaves it as it is."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

from greenroom.demo.tasks import TASKS, Sample, sample
from greenroom.replay import RoutingTrace

MAX_TOKENS = 48
RECORD_S = 1200


def drawn_prompts(count: int, seed: int = 7) -> list[Sample]:
    """Each of a task that is drawn too."""
    random = Random(seed)
    return [sample(random.choice(TASKS), seed=seed, index=number) for number in range(count)]


def record_routing(asked: Sequence[Sample]) -> RoutingTrace:
    """Routing of greedy answers. `greenroom trace` records it in its own process, which keeps torch's threads apart."""
    with tempfile.TemporaryDirectory() as name:
        file, out = Path(name) / "prompts.jsonl", Path(name) / "trace.npz"
        lines = [{"id": str(number), "task": one.task, "prompt": one.prompt} for number, one in enumerate(asked)]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = [sys.executable, "-c", "from greenroom.cli import main; main()", "--log-level", "error", "trace"]
        arguments = ["--prompts", str(file), "--out", str(out), "--max-tokens", str(MAX_TOKENS), "--tokens"]
        subprocess.run([*command, *arguments], check=True, timeout=RECORD_S, stdout=subprocess.DEVNULL)
        return RoutingTrace.load(out)
