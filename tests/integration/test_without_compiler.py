"""Processes of greenroom do not load torch's compiler. Code that uses it has all of it."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from greenroom.demo import bundled_model_path
from tests.integration.server import Server

HEAVY = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "triton")


def test_a_server_that_has_answered_has_not_imported_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # every import is a line on stderr
    with Server("--expert-memory", "33%", cache=tmp_path) as server:
        asked = urllib.request.Request(
            f"{server.url}/v1/completions",
            data=b'{"model": "greenroom-understudy", "prompt": "Hello", "max_tokens": 4}',
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=60) as reply:
            assert reply.status == 200
        assert server.terminate() == 0
    imported = {line.rpartition("|")[2].strip() for line in server.log if line.startswith("import time:")}
    assert {"torch", "greenroom.moe.batch.batch_engine"} <= imported, "this test can not see imports"
    assert not {name for name in imported if name.startswith(HEAVY)}


def test_a_command_that_only_looks_at_a_model_does_not_import_the_compiler_either() -> None:
    """One place does this for every command. This command makes a model without weights and ends."""
    child = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "greenroom", "info", str(bundled_model_path())],
        check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    imported = {line.rpartition("|")[2].strip() for line in child.stderr.splitlines()}
    assert "transformers.modeling_utils" in imported, "this test can not see imports"
    assert not {name for name in imported if name.startswith(("torch._dynamo", "torch._inductor", "triton"))}


def test_a_release_of_transformers_that_asks_otherwise_costs_memory_and_breaks_nothing() -> None:
    code = """
import sys, types
from greenroom.moe.torch_compiler import compiler_on_demand
compiler_on_demand()
one, other = types.ModuleType("transformers.utils.import_utils"), types.ModuleType("transformers.utils")
sys.modules.update({module.__name__: module for module in (one, other)})
one.is_torch_flex_attn_available = other.is_torch_flex_attn_available = lambda: True
def look():
    try:
        import transformers.nothing
    except ImportError:
        pass
sys.modules["transformers"] = types.ModuleType("transformers")
sys.modules["transformers"].__path__ = []
look()
assert one.is_torch_flex_attn_available(), "one of two was answered"
one.is_torch_distributed_available = other.is_torch_distributed_available = lambda: True
look()
assert not one.is_torch_flex_attn_available() and not other.is_torch_distributed_available()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


USED = """
import sys
from greenroom.moe.torch_compiler import compiler_on_demand
compiler_on_demand()
import torch, transformers.modeling_utils, transformers.integrations.moe
from transformers.masking_utils import TransformGetItemToIndex

@torch.compiler.disable
def hidden(x):
    return x + len(seen)

@torch._dynamo.allow_in_graph
def opaque(x):
    return x * 2

@torch._dynamo.assume_constant_result
def constant():
    return 7

held = torch._dynamo
assert hidden(1) == 1 if (seen := []) == [] else None
assert "torch._dynamo.eval_frame" not in sys.modules and "sympy" not in sys.modules
kinds = {use}
import torch._dynamo, torch._dynamo.utils, torch._dynamo.decorators
assert sys.modules["torch._dynamo"] is torch._dynamo and torch._dynamo.__spec__.origin.endswith("__init__.py")
assert torch._dynamo.utils is sys.modules["torch._dynamo.utils"] and torch._dynamo.utils.__spec__.origin
assert id(opaque) in torch._dynamo.trace_rules._allowed_callable_ids
assert constant._dynamo_marked_constant

def late(x):
    return x

assert held is not torch._dynamo and held.allow_in_graph(late) is late
assert id(late) in torch._dynamo.trace_rules._allowed_callable_ids
graphs = []
def backend(graph, inputs):
    graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
    return graph.forward

@torch.compile(backend=backend)
def function(x):
    return hidden(opaque(x) + 1) * 3

assert function(torch.ones(2)).tolist() == [9.0, 9.0]
assert len(graphs) == 2, graphs  # before and behind what the compiler is kept out of
assert any("opaque" in name for name in graphs[0]), graphs
"""


@pytest.mark.parametrize(
    "use",
    [
        "torch.compile(lambda x: x, backend='eager')(torch.ones(1))",
        pytest.param("__import__('torch._dynamo.utils')", marks=pytest.mark.full),
        pytest.param("TransformGetItemToIndex().__enter__()", marks=pytest.mark.full),
    ],
)
def test_code_that_uses_the_compiler_has_all_of_it(use: str) -> None:
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", USED.replace("{use}", use)],
        check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
