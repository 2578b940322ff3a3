"""What a start announces for an executor's images is what they take: never less, and not far more."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from greenroom.coe.computing.images import decoded_bytes
from greenroom.core.units import MIB
from tests.random_experts import save_expert

CHILD = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
import torch
from greenroom.profiling.coe.batch_memory import peak_growth
from tests.contract.coe.single_expert import collaborate, record_of

torch.set_num_threads(1)
figures = []
for folder, file, count in json.loads(sys.argv[1]):
    experts = collaborate(Path(folder).with_suffix(".toml"), [Path(folder)])
    image = Path(file).read_bytes()
    subject = SimpleNamespace(
        experts=(0,), weights=(record_of(experts, 0),), batch=lambda size: [image] * size
    )
    peak_growth(experts.computer, subject, count)  # what is made once
    figures.append(peak_growth(experts.computer, subject, count))
print(json.dumps(figures))
"""
BESIDE = 1 * MIB
"""What small random experts compute of them, and the system's own counting."""
KEPT = 0.75
"""The rest of what is announced is for what allocators keep. The child's keeps nothing."""


def test_images_take_no_more_memory_than_is_announced(tmp_path: Path) -> None:
    """By a process's own peak. Of files that are turned, which takes another copy."""
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn
    jobs, cases = [], []
    for family in ("resnet", "vit", "yolos"):
        folder = save_expert(family, tmp_path / family)
        for count, side in ((1, 2000), (6, 1400), (16, 500)):
            file = tmp_path / f"{side}.jpg"
            image = io.BytesIO()
            Image.new("RGB", (side, side), "green").save(image, "JPEG", exif=turned)
            file.write_bytes(image.getvalue())
            jobs.append((str(folder), str(file), count))
            cases.append((family, count, side))
    child = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(jobs)], cwd=Path(__file__).parents[2],
        check=False, timeout=240, capture_output=True, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    figures = json.loads(child.stdout.splitlines()[-1])
    if None in figures:
        pytest.skip("this system does not let a process measure its peak anew")
    for case, taken in zip(cases, figures, strict=True):
        announced = decoded_bytes(case[2] ** 2)
        assert 0.5 * announced < taken < KEPT * announced + BESIDE, (case, taken, announced)
