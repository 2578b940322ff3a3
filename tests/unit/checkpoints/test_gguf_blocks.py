"""The numbers of GGUF's blocks, to the bit those of the ``gguf`` package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from greenroom.checkpoints.gguf_blocks import SERVED, NotFinite, numbers_of
from greenroom.checkpoints.safetensors_headers import StoredTensor
from greenroom.checkpoints.shard_reader import ShardReader, torch_dtype, typed
from greenroom.core.errors import CorruptCheckpoint
from greenroom.gguf.block_types import TYPES, BlockType

gguf = pytest.importorskip("gguf", reason="gguf, by which the numbers are known, is not installed")

BY_NAME = {kind.name: kind for kind in TYPES.values()}
HALVES = {  # where a block has numbers in half precision
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
}


def random_blocks(kind: BlockType, count: int) -> torch.Tensor:
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (count, kind.nbytes), dtype=np.uint8)
    for at in HALVES[kind.name]:  # all that are numbers, those below the normal ones too
        halves = (
            random.integers(0, 0x7C00, count, dtype=np.uint16) | random.integers(0, 2, count, dtype=np.uint16) << 15
        )
        blocks[:, at : at + 2] = halves.astype(np.uint16)[:, None].view(np.uint8)
    if kind.name == "MXFP4":
        blocks[:, 0] %= 252  # beyond it some numbers are infinite
    return torch.from_numpy(blocks)


@pytest.mark.parametrize("rest", [1, 5])
@pytest.mark.parametrize("pieces", [0, 3])
@pytest.mark.parametrize("name", SERVED)
def test_every_served_type_means_what_ggml_says(name: str, pieces: int, rest: int) -> None:
    kind = BY_NAME[name]
    blocks = random_blocks(kind, pieces * (1 << 18) // kind.numbers + rest)
    expected = gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name])
    made = numbers_of(blocks.view(-1), kind)
    assert made.dtype is torch.float32
    assert torch.equal(made, torch.from_numpy(expected).view(-1))
    rounded = numbers_of(blocks.view(-1), kind, torch.bfloat16)
    assert torch.equal(rounded, torch.from_numpy(expected).view(-1).bfloat16()), "rounded once"


@pytest.mark.parametrize("name", SERVED)
def test_scales_that_are_no_numbers_are_refused(name: str) -> None:
    kind = BY_NAME[name]
    for place in (0, 4):
        blocks = random_blocks(kind, 5)
        if name == "MXFP4":
            blocks[place, 0] = 255
        else:
            at = HALVES[name][0]
            blocks[place, at : at + 2] = torch.tensor([0, 0x7E], dtype=torch.uint8)
        with pytest.raises(NotFinite, match="no number"):
            numbers_of(blocks.view(-1), kind)


def test_a_tensor_of_blocks_is_read_whole_or_by_its_first_dimension(tmp_path: Path) -> None:
    kind = BY_NAME["Q6_K"]
    blocks = random_blocks(kind, 3 * 4 * 2)
    path = tmp_path / "a.gguf"
    path.write_bytes(bytes(34) + blocks.numpy().tobytes())
    stored = StoredTensor("blk.0.x", path, "Q6_K", (3, 4, 512), 34, blocks.numel(), kind)
    assert stored.is_float
    assert torch_dtype(stored) is torch.float32
    whole = numbers_of(blocks.view(-1), kind).view(3, 4, 512)
    with ShardReader() as reader:
        assert torch.equal(typed(reader.read(stored), stored), whole)
        assert torch.equal(typed(reader.read(stored, 1), stored, 1), whole[1:2])
        assert torch.equal(typed(reader.read(stored), stored, dtype=torch.bfloat16), whole.bfloat16())
        blocks[17, 208:210] = 255
        path.write_bytes(bytes(34) + blocks.numpy().tobytes())
        with pytest.raises(CorruptCheckpoint, match=r"expert 2 of blk.0.x in .*a.gguf has a scale that is no number"):
            typed(reader.read(stored, 2), stored, 2)
