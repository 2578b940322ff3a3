"""Every command but serve, which has a test with a real process."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from greenroom.experts.pack.pack_file import PackFile
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.kept_format import kept_format
from greenroom.moe.loading.load_model import load
from greenroom.moe.native.rows import native_rows
from greenroom.worker.model import model_runtime
from greenroom.worker.model.memory_needs import dense_bytes
from tests.compiled import native as native
from tests.fp8_checkpoints import to_fp8
from tests.int4_checkpoints import KINDS, save_int4
from tests.mxfp4_checkpoints import save_mxfp4
from tests.pipeline.commands import commands, complaint_of, output_of, result_of
from tests.random_checkpoints import save_random

Run = Callable[..., tuple[str, str]]
"""Runs a command, checks its exit status, returns its stdout and stderr."""


@pytest.fixture
def run(pack_cache: None) -> Run:
    def said(*arguments: str, text: str | None = None, status: int = 0) -> tuple[str, str]:
        result = result_of(*arguments, text=text, status=status)
        return result.stdout, result.stderr

    return said


@pytest.mark.parametrize("command", [(), *commands()], ids=lambda words: " ".join(("greenroom", *words)))
def test_help_has_examples(command: tuple[str, ...]) -> None:
    assert "Example" in output_of(*command, "--help")


@pytest.mark.parametrize(
    ("command", "option", "value", "allowed"),
    [
        ("scheduler", "--max-queue-wait", "-1", "it is a number of seconds above 0"),
        ("scheduler", "--max-queue-wait", "inf", "it is a number of seconds above 0"),
        ("scheduler", "--lease", "0", "it is a number of seconds above 0"),
        ("worker", "--grace", "0", "it is a number of seconds above 0 and at most 3600"),
        ("worker", "--slow-gateway", "3601", "it is a number of seconds above 0 and at most 3600"),
        ("worker", "--forecast-timeout", "nan", "it is a number of seconds above 0 and at most 3600"),
    ],
)
def test_a_time_is_refused_in_the_words_that_it_was_given_in(
    run: Run, command: str, option: str, value: str, allowed: str
) -> None:
    said = run(command, option, value, status=2)[1]
    assert f"Invalid value for '{option}': {value} is not allowed; {allowed}" in said


def test_info_says_what_a_checkpoint_is(run: Run, checkpoint: Path) -> None:
    text = run("info", str(checkpoint))[0]
    assert "olmoe" in text
    assert "100%" in text
    facts = json.loads(run("info", str(checkpoint), "--json")[0])
    assert facts["experts"] == facts["moe_layers"] * facts["experts_per_layer"]
    assert facts["refused"] is None
    assert facts["kv_bytes_per_token"] > 0


def test_quantised_experts_are_said_and_packed_as_they_are_kept(run: Run, tmp_path: Path) -> None:
    folder = str(save_mxfp4(tmp_path / "m"))
    assert ", as mxfp4 (--experts-as)" in run("info", folder, "--experts-as", "stored")[0]
    assert "as mxfp4" not in run("info", folder, "--experts-as", "expanded")[0]
    sizes = {}
    for kept, name in (("stored", "mxfp4"), ("expanded", "plain")):
        facts = json.loads(run("info", folder, "--experts-as", kept, "--json")[0])
        assert facts["expert_format"] == name
        with contextlib.closing(PackFile.open(Path(run("pack", folder, "--experts-as", kept)[0].strip()))) as pack:
            assert pack.manifest.formats == (name,)
            assert facts["expert_bytes"] == pack.manifest.layers[0].layout.nbytes
        sizes[kept] = facts["expert_bytes"]
    assert sizes["stored"] < sizes["expanded"]
    assert "allowed: auto, stored, expanded" in run("pack", folder, "--experts-as", "int4", status=1)[1]
    assert "allowed: auto, native, torch" in run("pack", folder, "--products", "int4", status=1)[1]


@pytest.mark.usefixtures("native")
def test_dense_layers_are_said_and_counted_as_they_are_kept(run: Run, tmp_path: Path) -> None:
    plain = save_random("qwen3_moe", tmp_path / "plain", dtype=torch.bfloat16, hidden_size=256, head_dim=64)
    folder = str(to_fp8(plain, tmp_path / "m"))
    assert ", as fp8-blocks (--dense-as)" in run("info", folder)[0]
    kept, expanded = (json.loads(run("info", folder, "--dense-as", one, "--json")[0]) for one in ("auto", "expanded"))
    assert (kept["dense_formats"], expanded["dense_formats"]) == (["fp8-blocks"], [])
    assert kept["expert_bytes"] == expanded["expert_bytes"]
    in_bf16 = 3 * 2 * (4 + 2) * 64 * 256 * 2
    assert 0.49 * in_bf16 < expanded["dense_bytes"] - kept["dense_bytes"] < 0.5 * in_bf16
    said = run("info", folder, "--dense-as", "stored", "--products", "torch", status=1)[1]
    assert "dense_as: 'stored' is not allowed; only compiled products take codes" in said


@pytest.mark.usefixtures("native")
def test_dense_layers_are_counted_as_numbers_where_no_headers_say_what_they_are(run: Run, tmp_path: Path) -> None:
    folder = to_fp8(save_random("qwen3_moe", tmp_path / "plain", dtype=torch.bfloat16), tmp_path / "model")
    numbers = json.loads(run("info", str(folder), "--dense-as", "expanded", "--json")[0])
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert "at most: only the weights' headers say which of them are codes (--dense-as)" in run("info", str(folder))[0]
    told = json.loads(run("info", str(folder), "--json")[0])
    assert (told["dense_bytes"], told["dense_may_be_less"]) == (numbers["dense_bytes"], True)
    assert not numbers["dense_may_be_less"]
    assert "at most" not in run("info", str(folder), "--dense-as", "expanded")[0]


@pytest.mark.usefixtures("native")
def test_experts_that_would_stay_codes_in_bfloat16_are_said(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Most GPTQ and AWQ checkpoints say that they are float16, for which there are no compiled products."""
    plain = save_random("qwen3_moe", tmp_path / "plain", dtype=torch.float16, hidden_size=64, moe_intermediate_size=64)
    folder = str(save_int4(plain, tmp_path / "m", KINDS["gptq"]))
    assert ", made of int4, which they stay with --dtype bfloat16" in run("info", folder)[0]
    assert json.loads(run("info", folder, "--json")[0])["stays_in_bfloat16"] == "int4"
    for chosen in ("--dtype float16", "--dtype bfloat16", "--experts-as expanded", "--products torch"):
        assert "made of" not in run("info", folder, *chosen.split())[0]
    run("pack", folder, "--dtype", "bfloat16")
    assert "they stay" not in caplog.text
    run("pack", folder)
    assert "experts are stored as int4" in caplog.text
    assert "with --dtype bfloat16 they stay as they are" in caplog.text


def test_lossless_experts_are_said_and_packed_so(run: Run, tmp_path: Path) -> None:
    folder = str(save_random("mixtral", tmp_path / "m", dtype=torch.bfloat16, hidden_size=256, intermediate_size=512))
    kept = "lossless-planes" if native_rows().is_for_planes else "lossless"
    assert f", as {kept} (--experts-as)" in run("info", folder, "--experts-as", "lossless")[0]
    facts = json.loads(run("info", folder, "--experts-as", "lossless", "--json")[0])
    packed = Path(run("pack", folder, "--experts-as", "lossless", "--verify")[0].strip())
    with contextlib.closing(PackFile.open(packed)) as pack:
        assert (*pack.manifest.formats, facts["expert_format"]) == (kept, kept)
        assert facts["expert_bytes"] == pack.manifest.layers[0].layout.nbytes
    assert facts["expert_bytes"] <= 0.77 * 3 * 256 * 512 * 2
    quantised = str(save_mxfp4(tmp_path / "q"))
    for command in ("info", "pack"):
        said = run(command, quantised, "--experts-as", "lossless", status=1)[1]
        assert "experts_as: 'lossless' is not allowed; these experts are quantised (mxfp4): use stored" in said


def test_a_pack_is_made_as_serve_will_take_it(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU `serve` computes there by default, where experts are expanded by default."""
    checkpoint = resolve(str(save_mxfp4(tmp_path / "m")))
    folder, on_a_cpu = str(checkpoint.folder), kept_format(checkpoint).name
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for options, name in (
        ([], "plain"),
        (["--device", "cpu"], on_a_cpu),
        (["--device", "cpu", "--products", "torch"], "plain"),
    ):
        facts = json.loads(run("info", folder, *options, "--json")[0])
        with contextlib.closing(PackFile.open(Path(run("pack", folder, *options)[0].strip()))) as pack:
            assert (*pack.manifest.formats, facts["expert_format"]) == (name, name), options


def test_info_of_what_is_not_served_says_why(run: Run, tmp_path: Path) -> None:
    folder = save_random("switch_transformers", tmp_path / "m")
    assert "encoder-decoder" in run("info", str(folder))[0]


def test_info_needs_no_weights(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    facts = json.loads(run("info", str(checkpoint), "--json")[0])
    copy = tmp_path / "config-alone"
    copy.mkdir()
    shutil.copy(checkpoint / "config.json", copy)
    alone = json.loads(run("info", str(copy), "--json")[0])
    assert alone == {**facts, "name": str(copy), "checked": False}
    assert facts["checked"]
    assert facts["dense_bytes"] == dense_bytes(load(resolve(str(checkpoint))).model)
    assert "none here" in run("info", str(copy))[0]


def test_what_the_system_refuses_is_a_sentence(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = run("demo", "widen", "--expert-mib", "0.1", str(tmp_path / "file" / "folder"), status=1)[1]
    assert said.splitlines()[-1] == f"Error: File exists: {tmp_path / 'file'}"


@pytest.mark.parametrize(
    ("command", "option", "field"),
    [
        ("serve", "--port", "port"),
        ("serve", "--grpc-port", "grpc_port"),
        ("worker", "--listen", "listen"),
        ("worker", "--probe-port", "probe_port"),
    ],
)
def test_a_port_that_is_taken_is_told_before_anything_is_loaded(
    run: Run, command: str, option: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runtime, "ModelRuntime", lambda *_, **__: pytest.fail("a model was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        own = ("--port", "0") if option == "--grpc-port" else ()
        given = address if option == "--listen" else address.partition(":")[2]
        said = run(command, *own, option, given, status=1)[1]
    assert said.splitlines()[-1] == (
        f"Error: {field}: '{address}' is not allowed; it can not be listened on: Address already in use; "
        f"choose another with {option}"
    )


# A signal that comes just before an endless read waits for its end, and with other threads about that is no rarity.
PACK = """
import select
import sys
from greenroom.cli import main
from greenroom.experts.pack.pack_file import PackWriter

def write(*arguments):
    print("writing", flush=True)
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        pass

PackWriter.write = write
main(["pack", sys.argv[1], "--cache-dir", sys.argv[2]])
"""


def test_an_end_by_sigterm_while_packing_leaves_nothing_behind(checkpoint: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    child = subprocess.Popen(
        [sys.executable, "-c", PACK, str(checkpoint), str(cache)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "writing\n"
        (partial,) = cache.joinpath("packs").iterdir()
        assert partial.stat().st_size > 0
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 128 + signal.SIGTERM
    assert list(cache.joinpath("packs").iterdir()) == []


def test_pack_prints_the_path_and_verifies(run: Run, checkpoint: Path) -> None:
    path = Path(run("pack", str(checkpoint), "--verify")[0].strip())
    assert path.exists()
    assert run("pack", str(checkpoint))[0].strip() == str(path), "found again"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert "was altered" in run("pack", str(checkpoint), "--verify", status=1)[1]
    run("pack", str(checkpoint), "--force", "--verify")


def test_an_altered_pack_is_refused(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every expert is wanted at 100 %, so the start finds the altered record."""
    monkeypatch.setenv("GREENROOM_CACHE", str(tmp_path))
    start = ("generate", "x", "--model", str(checkpoint), "--max-tokens", "1", "--expert-memory", "100%")
    output_of(*start)
    (pack,) = (tmp_path / "packs").glob("*.pack")
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    said = output_of(*start, status=1)
    assert "was altered" in said
    assert "greenroom pack --force" in said


def test_generate_from_arguments_file_and_stdin(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    common = ("generate", "--model", str(checkpoint), "--expert-memory", "50%", "--max-tokens", "6", "--json")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n\ntwo\n')
    by_file = [json.loads(line) for line in run(*common, "--file", str(prompts))[0].splitlines()]
    by_argument = [json.loads(line) for line in run(*common, "one", "two")[0].splitlines()]
    by_stdin = [json.loads(line) for line in run(*common, text="one\ntwo\n")[0].splitlines()]
    assert by_file == by_argument == by_stdin
    assert [record["prompt"] for record in by_file] == ["one", "two"]
    assert all(0 < record["completion_tokens"] <= 6 for record in by_file)
    raw = json.loads(run(*common, "--raw", "one")[0])
    assert raw["prompt_tokens"] < by_file[0]["prompt_tokens"], "without the template"


def test_generate_says_what_was_approximated(run: Run, checkpoint: Path) -> None:
    common = ("generate", "--model", str(checkpoint), "--expert-memory", "50%", "--max-tokens", "6", "--raw")
    exact, said = run(*common, "--json", "one")
    assert json.loads(exact)["approximated"] == 0
    assert "approximated" not in said
    near, said = run(*common, "--json", "--cold-start", "--fidelity", "paper", "--policy", "lru", "one", "two")
    shares = [json.loads(line)["approximated"] for line in near.splitlines()]
    assert all(0 < share <= 1 for share in shares)
    mean, most = sum(shares) / 2, max(shares)
    assert f"approximated: {mean:.2%} of the routing (mean of the answers, at most {most:.2%}) went to experts" in said


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        ((), "", "no prompts"),
        ((), '{"text": "x"}\n', "line 1 is no JSON object with a field `prompt`"),
        (("x", "--temperature", "9"), None, "temperature must be from 0 to 2"),
        (("x", "--policy", "magic"), None, "fifo, lfu"),
        (("x", "--max-tokens", "100000"), None, "tokens in all"),
        (("x", "--revision"), None, "requires an argument"),
        (("x", "--expert-memory", "1KiB"), None, "one layer's router picks"),
    ],
)
def test_mistakes_are_explained(
    pack_cache: None, checkpoint: Path, arguments: tuple[str, ...], text: str | None, message: str
) -> None:
    assert message in complaint_of("generate", "--model", str(checkpoint), *arguments, text=text)
