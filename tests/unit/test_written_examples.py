"""The code that guides give to newcomers works as it is written."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from greenroom.policies.base.events import LayerRouting, Reason, Step, Tier, VictimRequest
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.predictor.kinds.artifact_files import ArtifactFileKind
from greenroom.predictor.kinds.config import BuildingConfig
from greenroom.predictor.making.job import Job
from greenroom.predictor.making.pace import EveryMany
from greenroom.predictor.traces.counts import Picks
from greenroom.predictor.traces.samples import Kept

ROOT = Path(__file__).resolve().parents[2]


def written(page: str, start: str) -> str:
    """The block of Python code of a page that begins so."""
    blocks = re.findall(r"^ *```python\n(.*?)^ *```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    (block,) = [block for block in map(textwrap.dedent, blocks) if block.startswith(start)]
    return block


def test_the_policy_of_the_guide() -> None:
    code = written("docs/guides/add-a-policy.md", '"""Most recently used."""')
    names: dict[str, Any] = {}
    exec(compile(code, "most_recent.py", "exec", dont_inherit=True), names)  # noqa: S102
    catalogue = Catalogue.uniform("", layers=1, experts=4, top_k=1)
    policy, step = names["MostRecent"](catalogue), Step("", 1, np.zeros(1, np.int64), np.zeros(1, np.uint8))
    for expert in (2, 0, 1):
        policy.on_layer_routed(LayerRouting.from_picks(catalogue, step, 0, np.array([[expert]])))
    here = np.array([True, True, True, False])
    request = VictimRequest(
        tier=Tier.DEVICE, bytes_needed=2 * int(catalogue.bytes_of[0]), evictable=here, resident=here,
        reason=Reason.ON_DEMAND, incoming=np.array([3]),
    )  # fmt: skip
    assert policy.victims(request).tolist() == [1, 0]


def test_the_policy_of_the_guide_is_in_the_projects_style() -> None:
    code = written("docs/guides/add-a-policy.md", '"""Most recently used."""')
    place = "services/greenroom/policies/replacement/most_recent.py"
    for command in (["check"], ["format", "--check"]):
        subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--stdin-filename", place, "-"],
            input=code, text=True, cwd=ROOT, check=True, timeout=60,
        )  # fmt: skip


def test_the_kind_of_contributing() -> None:
    names = {
        "ArtifactFileKind": ArtifactFileKind, "BuildingConfig": BuildingConfig, "EveryMany": EveryMany, "Job": Job,
        "Kept": Kept, "MlpFile": type("MlpFile", (), {"KIND": "mlp", "dump": None, "parse": None}), "Picks": Picks,
    }  # fmt: skip
    exec(written("CONTRIBUTING.md", "class MlpKind"), names)  # noqa: S102
    kind = names["MlpKind"](BuildingConfig())
    assert kind.name == kind.keeps == "mlp"
    for made, after in ((False, 100), (True, 1000)):
        pace = kind.pace(made)
        for _ in range(after):
            assert not pace.due
            pace.note(None)
        assert pace.due


def test_contributing_names_files_that_there_are() -> None:
    """But for those of its examples, which a newcomer is to write."""
    files = [
        str(path.relative_to(ROOT)) for folder in ("services", "benchmarks", "tests") for path in python_files(folder)
    ]
    named = set(re.findall(r"`([\w./]+\.py)`", (ROOT / "CONTRIBUTING.md").read_text()))
    assert named
    missing = [name for name in named if not any(("/" + file).endswith("/" + name) for file in files)]
    assert [name for name in missing if "mlp" not in name] == []


def python_files(folder: str) -> list[Path]:
    return list((ROOT / folder).rglob("*.py"))
