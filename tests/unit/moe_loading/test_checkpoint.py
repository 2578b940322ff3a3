from __future__ import annotations

import fnmatch
import json
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import load_file, save_file

from greenroom.core.errors import CorruptCheckpoint, GreenroomError, InvalidConfig, UnsupportedModel
from greenroom.moe.architecture.moe_layers import blueprint
from greenroom.moe.loading.checkpoint import resolve, resolve_config
from greenroom.moe.loading.load_model import load
from tests.random_checkpoints import edit_json
from tests.unit.moe_loading.privileges import permissions_count

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def put_a_folder(path: Path) -> None:
    """In the place of a file."""
    path.unlink()
    path.mkdir()


def test_a_folder(folder: Path) -> None:
    checkpoint = resolve(str(folder))
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert checkpoint.tensors.keys() == weight_map.keys()
    assert [shard.name for shard in checkpoint.shards] == sorted(set(weight_map.values()))
    assert checkpoint.config.model_type == "mixtral"
    assert checkpoint.stored_dtype == "bfloat16"
    assert checkpoint.name == str(folder)


def test_the_dtype_is_that_of_the_tensors_where_the_configuration_has_none(folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.pop("dtype"))
    assert resolve(str(folder)).stored_dtype == "bfloat16"


def test_loading_a_folder_opens_no_connection(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert load(resolve(str(folder))).dtype == torch.bfloat16


# what is wrong with a folder, the error, what its text must say
BROKEN: dict[str, tuple[Any, type[GreenroomError], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), CorruptCheckpoint, r"has no config\.json"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), CorruptCheckpoint, r"config\.json.*read"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), CorruptCheckpoint, r"config\.json"),
    "config without type": (
        lambda f: edit_json(f / "config.json", lambda c: c.pop("model_type")),
        CorruptCheckpoint,
        "model_type",
    ),
    "config not valid": (
        lambda f: edit_json(f / "config.json", lambda c: c.update(num_hidden_layers="many")),
        CorruptCheckpoint,
        "not valid",
    ),
    "unknown type": (
        lambda f: edit_json(f / "config.json", lambda c: c.update(model_type="gobbledegook")),
        UnsupportedModel,
        "'gobbledegook' are not supported.*does not know it.*known to work: .*mixtral",
    ),
    "own code": (
        lambda f: edit_json(f / "config.json", lambda c: c.update(model_type="own", auto_map={"AutoConfig": "own.C"})),
        UnsupportedModel,
        "needs code of its own.*never run",
    ),
    "weights under another name": (
        lambda f: edit_json(f / "config.json", lambda c: c.update(transformers_weights="other.safetensors")),
        UnsupportedModel,
        "transformers_weights",
    ),
    "missing shard": (
        lambda f: first_shard(f).unlink(),
        CorruptCheckpoint,
        r"lacks 1 of \d+ shards that .*index\.json names, so it was not fully downloaded: model-00001-of-",
    ),
    "truncated shard": (
        lambda f: first_shard(f).write_bytes(first_shard(f).read_bytes()[:-10]),
        CorruptCheckpoint,
        "model-00001-of-.*truncated",
    ),
    "shard of something else": (
        lambda f: shutil.copy(sorted(f.glob("*.safetensors"))[1], first_shard(f)),
        CorruptCheckpoint,
        "is both in",
    ),
    "index names what no shard has": (
        lambda f: edit_json(
            f / "model.safetensors.index.json", lambda i: i["weight_map"].update(ghost=first_shard(f).name)
        ),
        CorruptCheckpoint,
        "ghost and 0 more are not where",
    ),
    "index leads elsewhere": (
        lambda f: edit_json(
            f / "model.safetensors.index.json", lambda i: i["weight_map"].update(x="../../etc/secret.safetensors")
        ),
        CorruptCheckpoint,
        "which is no file beside it",
    ),
    "index is no JSON": (
        lambda f: (f / "model.safetensors.index.json").write_text("nope"),
        CorruptCheckpoint,
        "index.json.*can not be read",
    ),
    "no weights": (
        lambda f: [path.unlink() for path in f.glob("*.safetensors*")],
        CorruptCheckpoint,
        "has neither model.safetensors nor",
    ),
    "config is a folder": (
        lambda f: put_a_folder(f / "config.json"),
        CorruptCheckpoint,
        r"config\.json can not be read: Is a directory",
    ),
    "index is a folder": (
        lambda f: put_a_folder(f / "model.safetensors.index.json"),
        CorruptCheckpoint,
        r"index\.json can not be read: Is a directory",
    ),
    "a folder in a shard's place": (
        lambda f: put_a_folder(first_shard(f)),
        CorruptCheckpoint,
        r"model-00001-of-.* can not be read: Is a directory",
    ),
    "pickle only": (
        lambda f: [(f / "pytorch_model.bin").write_bytes(b"x"), *(path.unlink() for path in f.glob("*.safetensors*"))],
        UnsupportedModel,
        "pickle.*can run code",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_folder_is_refused(folder: Path, what: str) -> None:
    spoil, error, message = BROKEN[what]
    spoil(folder)
    with pytest.raises(error, match=message):
        resolve(str(folder))


@pytest.mark.parametrize("name", [".", "config.json", "model.safetensors.index.json", "model-00001-of-*.safetensors"])
def test_what_may_not_be_read_is_told(folder: Path, name: str) -> None:
    path = next(folder.glob(name)) if "*" in name else folder / name
    path.chmod(0)
    try:
        with permissions_count(), pytest.raises(CorruptCheckpoint, match=r"can not be read: Permission denied"):
            resolve(str(folder))
    finally:
        path.chmod(0o700)


# what config.json says that its weights can not be, the error, what its text must say
WRONG: dict[str, tuple[dict[str, Any], type[GreenroomError], str]] = {
    "no expert a token": (
        {"num_experts_per_tok": 0},
        CorruptCheckpoint,
        "num_experts_per_tok 0: a token takes at least",
    ),
    "more than there are": ({"num_experts_per_tok": 9}, CorruptCheckpoint, "at most the 8 that a layer has"),
    "a size below nothing": ({"hidden_size": -32}, CorruptCheckpoint, r"no MixtralForCausalLM of config\.json: "),
    "fewer layers": (
        {"num_hidden_layers": 2},
        CorruptCheckpoint,
        r"has model\.layers\.2, and config\.json a model with 2 such layers: part of the model would be left out",
    ),
    "more layers": ({"num_hidden_layers": 4}, CorruptCheckpoint, r"lacks model\.layers\.3"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_configuration_that_is_not_of_the_weights_is_refused(folder: Path, what: str) -> None:
    change, error, message = WRONG[what]
    edit_json(folder / "config.json", lambda config: config.update(change))
    with pytest.raises(error, match=message):
        load(resolve(str(folder)))


def test_fewer_layers_are_seen_by_tensors_that_have_no_place_as_well(folder: Path) -> None:
    """Older checkpoints have a buffer a layer that no model takes any more."""
    shard = first_shard(folder)
    more = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.zeros(4) for n in range(3)}
    save_file(load_file(shard) | more, shard, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    edit_json(index, lambda entry: entry["weight_map"].update(dict.fromkeys(more, shard.name)))
    assert len(load(resolve(str(folder))).layers) == 3
    edit_json(folder / "config.json", lambda config: config.update(num_hidden_layers=2))
    with pytest.raises(CorruptCheckpoint, match="a model with 2 such layers"):
        load(resolve(str(folder)))


def test_a_size_that_is_text_is_refused(folder: Path) -> None:
    """Whether transformers refuses it as it reads the configuration or as it makes the model."""
    edit_json(folder / "config.json", lambda config: config.update(hidden_size="wide"))
    with pytest.raises(CorruptCheckpoint, match=r"config\.json"):
        load(resolve(str(folder)))


def test_a_layer_of_another_kind_behind_the_last_is_left_out(folder: Path) -> None:
    """As those that predict several tokens ahead are stored; transformers leaves them out as well."""
    shard = first_shard(folder)
    tensors = load_file(shard)
    more = {"model.layers.3.eh_proj.weight": torch.zeros(2), "model.layers.3.input_layernorm.weight": torch.zeros(32)}
    save_file(tensors | more, shard, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    edit_json(index, lambda entry: entry["weight_map"].update(dict.fromkeys(more, shard.name)))
    assert len(load(resolve(str(folder))).layers) == 3


def test_a_multimodal_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    """transformers has a class for its text model, which takes another configuration."""
    transformers.Llama4Config().save_pretrained(tmp_path)
    with pytest.raises(
        UnsupportedModel, match=r"'llama4' are not supported: it is a multimodal checkpoint, whose text"
    ):
        blueprint(resolve_config(str(tmp_path)).config, torch.float32)


def test_the_configuration_alone(folder: Path) -> None:
    with_weights = resolve_config(str(folder))
    assert with_weights.tensors.keys() == resolve(str(folder)).tensors.keys()
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    alone = resolve_config(str(folder))
    assert alone.tensors == {}
    assert alone.stored_dtype == "bfloat16"


def test_the_configuration_of_half_a_download_is_not_taken_for_all(folder: Path) -> None:
    first_shard(folder).unlink()
    with pytest.raises(CorruptCheckpoint, match="lacks 1 of"):
        resolve_config(str(folder))


def test_own_code_of_a_known_family_is_not_run(folder: Path) -> None:
    """Real checkpoints of known families come with code as well; transformers' own class is taken."""
    (folder / "modeling_own.py").write_text("raise SystemExit('it ran')")
    auto_map = {"AutoConfig": "modeling_own.C", "AutoModelForCausalLM": "modeling_own.M"}
    edit_json(folder / "config.json", lambda config: config.update(auto_map=auto_map))
    assert type(load(resolve(str(folder))).model).__module__.startswith("transformers.models.mixtral")


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "compressed-tensors", "hqq", "mxfp4"])
def test_quantised_checkpoints_are_refused_by_name(folder: Path, method: str) -> None:
    edit_json(folder / "config.json", lambda config: config.update(quantization_config={"quant_method": method}))
    with pytest.raises(UnsupportedModel, match=rf"is quantised \({method}\).*(use the|make a bf16 copy)"):
        resolve(str(folder))


@pytest.mark.parametrize("settings", [{"quantization_config": {"bits": 4}}, {"compression_config": {"format": "x"}}])
def test_a_quantisation_without_a_name_is_refused(folder: Path, settings: dict[str, Any]) -> None:
    edit_json(folder / "config.json", lambda config: config.update(settings))
    with pytest.raises(UnsupportedModel, match=r"is quantised \(unnamed\).* no quant_method: add that"):
        resolve(str(folder))


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "~/nothing-at-all", "a/b/c", "no\\such"])
def test_a_path_to_nothing_never_asks_the_hub(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(InvalidConfig, match="there is no such folder"):
        resolve(model)


def test_a_folder_has_no_revisions(folder: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"revision: 'main' is not allowed.*is a folder"):
        resolve(str(folder), revision="main")


class FakeHub:
    """Stands in for the hub's download: one repository, files taken from a folder by the patterns asked for."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self._folder = folder
        self._snapshot = cache / "snapshots" / COMMIT
        self.calls: list[dict[str, Any]] = []

    def __call__(self, repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str], **options: Any) -> str:
        got = []
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder).as_posix()
            wanted = any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns)
            if path.is_file() and wanted and not any(fnmatch.fnmatch(name, pattern) for pattern in ignore_patterns):
                target = self._snapshot / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
                got.append(name)
        self.calls.append({"repo": repo_id, "got": got, **options})
        return str(self._snapshot)


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(folder, tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return fake


def test_only_what_is_needed_is_downloaded(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    for name in ("consolidated.00.safetensors", "original/model.safetensors", "metal/model.bin", "pytorch_model.bin"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"the same weights again")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("")
    (folder / "modeling_own.py").write_text("")
    checkpoint = resolve("someone/model", revision="v1", cache_dir=tmp_path)
    small, weights = hub.calls
    assert set(small["got"]) >= {"config.json", "model.safetensors.index.json", "tokenizer.json", "chat_template.jinja"}
    assert not [name for name in small["got"] if name.endswith(("safetensors", "bin", "py")) or "/" in name]
    assert set(weights["got"]) == {shard.name for shard in checkpoint.shards}
    assert (small["repo"], small["revision"], small["cache_dir"]) == ("someone/model", "v1", tmp_path)
    assert weights["revision"] == COMMIT, "both downloads are of one commit"


def test_the_configuration_of_a_repository_needs_none_of_its_weights(hub: FakeHub, tmp_path: Path) -> None:
    assert resolve_config("someone/model", revision="v1", cache_dir=tmp_path).tensors == {}
    (small,) = hub.calls
    assert not [name for name in small["got"] if name.endswith("safetensors")]
    everything = resolve("someone/model", revision="v1", cache_dir=tmp_path)
    assert resolve_config("someone/model", revision="v1", cache_dir=tmp_path).tensors == everything.tensors


def test_a_repository_with_one_file_of_weights(hub: FakeHub, folder: Path) -> None:
    from tests.random_checkpoints import save_random

    shutil.rmtree(folder)
    save_random("olmoe", folder, max_shard_size="1GB")
    assert [shard.name for shard in resolve("someone/model").shards] == ["model.safetensors"]


@pytest.mark.parametrize("has_config", [True, False])
def test_a_repository_of_gguf_files_says_what_to_do(hub: FakeHub, folder: Path, has_config: bool) -> None:
    for path in folder.iterdir():
        if not (has_config and path.name == "config.json"):
            path.unlink()
    (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    with pytest.raises(CorruptCheckpoint, match=r"get one with `hf download someone/model-GGUF FILE\.gguf`"):
        resolve("someone/model-GGUF")


def test_what_is_not_served_is_refused_before_its_weights_are_downloaded(hub: FakeHub, folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.update(quantization_config={"quant_method": "awq"}))
    with pytest.raises(UnsupportedModel, match="awq"):
        resolve("someone/model")
    assert len(hub.calls) == 1


def failing(error: Exception) -> Any:
    def download(*_: object, **__: object) -> str:
        raise error

    return download


ANSWER: Any = SimpleNamespace(headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "field", "message"),
    [
        (RepositoryNotFoundError("404", response=ANSWER), "model", "nor such a repository"),
        (GatedRepoError("403", response=ANSWER), "model", "owner has to grant access"),
        (RevisionNotFoundError("404", response=ANSWER), "revision", "has no such branch, tag or commit"),
        (LocalEntryNotFoundError("no"), "model", "not cached at revision v9, and the hub can not be reached"),
        (ConnectionError("no route"), "model", r"can not be reached \(no route\)"),
    ],
)
def test_what_the_hub_refuses(error: Exception, field: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing(error))
    with pytest.raises(InvalidConfig, match=message) as caught:
        resolve("someone/model", revision="v9")
    assert caught.value.field == field


def test_what_is_no_repository_id() -> None:
    with pytest.raises(InvalidConfig, match="neither a folder nor a repository id"):
        resolve("not a model!", offline=True)


def hub_cache(root: Path, source: Path, leave_out: str = "") -> Path:
    """The hub's cache on disk as its client leaves it: blobs, and snapshots of links to them."""
    repository = root / "models--someone--model"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for number, path in enumerate(sorted(source.iterdir())):
        if path.name != leave_out:
            blob = repository / "blobs" / f"{number:040x}"
            shutil.copy(path, blob)
            (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    return root


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_offline_from_the_cache(folder: Path, tmp_path: Path, revision: str | None) -> None:
    cache = hub_cache(tmp_path / "hub", folder)
    checkpoint = resolve("someone/model", revision=revision, offline=True, cache_dir=cache)
    assert checkpoint.tensors.keys() == resolve(str(folder)).tensors.keys()
    assert load(checkpoint).dtype == torch.bfloat16


def test_offline_by_the_hubs_own_variable(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cache = hub_cache(tmp_path / "hub", folder)
    assert resolve("someone/model", cache_dir=cache).config.model_type == "mixtral"
    with pytest.raises(InvalidConfig, match="not cached, and offline mode is on"):
        resolve("someone/other", cache_dir=cache)


def test_offline_with_a_revision_that_is_not_there(folder: Path, tmp_path: Path) -> None:
    cache = hub_cache(tmp_path / "hub", folder)
    with pytest.raises(InvalidConfig, match="not cached at revision v2, and offline mode is on"):
        resolve("someone/model", revision="v2", offline=True, cache_dir=cache)


def test_offline_with_half_of_the_shards(folder: Path, tmp_path: Path) -> None:
    cache = hub_cache(tmp_path / "hub", folder, leave_out=first_shard(folder).name)
    with pytest.raises(CorruptCheckpoint, match=r"lacks 1 of .*run once without offline mode"):
        resolve("someone/model", offline=True, cache_dir=cache)
