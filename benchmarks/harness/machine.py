"""What a benchmark ran on, read from the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.disk import ReadAhead

_X86_BF16 = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_ARM_BF16 = ("asimd", "bf16", "i8mm", "sve")
_PACKAGES = ("torch", "transformers", "accelerate", "numpy")


def cache_folder() -> Path:
    """Where greenroom keeps checkpoints and packs; benchmarks put large files beside them, to be on the same disk."""
    return Path(os.environ.get("GREENROOM_CACHE") or "~/.cache/greenroom").expanduser()


def describe_machine(folder: Path) -> dict[str, Any]:
    """Processor, memory, the disk of ``folder`` (which need not exist), versions, and the commit if known."""
    read_ahead = ReadAhead(next(place for place in (folder, *folder.absolute().parents) if place.exists()))
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "instructions": _instructions(),
        "compiled_products": _compiled_products(),
        "gpu": _gpu(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "disk": read_ahead.device,
        "disk_read_ahead_kib": read_ahead.kib,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "commit": _commit(),
    }


def _processor() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _instructions() -> list[str]:
    """Those of the processor's extensions that decide how fast bf16 products are."""
    flags = [*_cpuinfo("flags").split(), *_cpuinfo("Features").split()]  # ARM's kernels call them features
    return [flag for flag in (*_X86_BF16, *_ARM_BF16) if flag in flags]


def _compiled_products() -> str | None:
    """The instruction set that greenroom's own products are computed with. None: torch's are used."""
    try:
        from greenroom.moe.native.library import NativeUnavailable
        from greenroom.moe.native.rows import native_rows
    except ImportError:  # an environment without torch
        return None
    try:
        return native_rows().instruction_set
    except NativeUnavailable:
        return None


def _gpu() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _cpuinfo(name: str) -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True,
            timeout=10, check=True,
        )  # fmt: skip
        return done.stdout.strip()
    return None
