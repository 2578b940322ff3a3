"""Makes ``greenroom.v1`` from ``proto/``: what ``make proto`` runs, and what the test of currency compares with.

python -m tests.contract.protos.generate            rewrite services/greenroom/v1 and add what is new to v1.json
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tests.contract.protos.interface import SNAPSHOT, breaks, described, load, save

ROOT = Path(__file__).resolve().parents[3]
PROTOS = ROOT / "proto"
PACKAGE = "greenroom/v1"
PUBLIC = ("inference.proto",)
"""The services that others call: their stubs are typed for both kinds of channel. The rest is asyncio only."""


def generate(out: Path) -> list[Path]:
    """Writes the modules below ``out``/greenroom/v1 and names them. Raises SystemExit with what protoc said."""
    for tool in ("protoc-gen-mypy", "protoc-gen-mypy_grpc"):
        if not _beside_python(tool).exists():
            raise SystemExit(f"{tool} is not installed beside {sys.executable}: run `make proto`, which sets it up")
    every = sorted(path.name for path in (PROTOS / PACKAGE).glob("*.proto"))
    _protoc(every, f"--python_out={out}", f"--grpc_python_out={out}", f"--mypy_out=quiet:{out}")
    _protoc([name for name in every if name in PUBLIC], f"--mypy_grpc_out=quiet:{out}")
    _protoc([name for name in every if name not in PUBLIC], f"--mypy_grpc_out=quiet,only_async:{out}")
    return sorted((out / PACKAGE).glob("*_pb2*"))


def _protoc(names: list[str], *outputs: str) -> None:
    plugins = [f"--plugin={tool}={_beside_python(tool)}" for tool in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    sources = [str(PROTOS / PACKAGE / name) for name in names]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *plugins, *outputs, *sources]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise SystemExit(f"protoc failed:\n{done.stderr or done.stdout}")


def _beside_python(tool: str) -> Path:
    return Path(sys.executable).parent / tool


def _accept() -> None:
    """What is new goes into the snapshot; what breaks it is refused."""
    now = described()
    broken = breaks(load(SNAPSHOT), now) if SNAPSHOT.exists() else []
    if broken:
        raise SystemExit("\n".join(broken))
    save(SNAPSHOT, now)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accept", action="store_true", help="only bring v1.json up to date with the modules")
    if parser.parse_args().accept:
        _accept()
        return
    generate(ROOT / "services")
    # In a process of its own, which imports what has just been written.
    done = subprocess.run([sys.executable, "-m", "tests.contract.protos.generate", "--accept"], cwd=ROOT, check=False)
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
