"""The compiled products against exact arithmetic, and the invariances that the engine's exactness rests on."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from greenroom.core.errors import InvalidConfig
from greenroom.moe.native.library import NativeUnavailable
from greenroom.moe.native.rows import (
    ALL_INSTRUCTION_SETS,
    AttentionWeights,
    lowered,
)
from tests.examples import examples
from tests.unit.kernels.instruction_sets import instruction_set as instruction_set
from tests.unit.kernels.instruction_sets import native, random

SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 90).map(lambda n: 2 * n), st.integers(1, 70))


def expert(
    up: torch.Tensor, down: torch.Tensor, rows: torch.Tensor, tokens: list[int], scales: list[float], out: torch.Tensor,
    *, add: bool,
) -> torch.Tensor:  # fmt: skip
    where, by = np.array(tokens, dtype=np.int64), np.array(scales, dtype=np.float32)
    native.experts([(up, down)], np.array([0, len(tokens)]), rows, where, by, out, add=add)
    return out


@given(SHAPES, st.integers(0, 2**31))
@settings(max_examples=examples(80), deadline=None)
def test_a_product_is_the_exact_one_but_for_fp32_sums_and_one_rounding(shape: tuple[int, int, int], seed: int) -> None:
    count, inputs, outputs = shape
    rows, weight = random(seed, count, inputs), random(seed + 1, outputs, inputs)
    bias = random(seed + 2, outputs) if seed % 2 else None
    got = native.linear(rows, weight, bias).double()
    exact = rows.double() @ weight.double().T + (0 if bias is None else bias.double())
    largest = rows.double().abs() @ weight.double().abs().T
    assert ((got - exact).abs() <= exact.abs() * 2.0**-8 + largest * inputs * 2.0**-24).all()


@given(SHAPES, st.integers(0, 2**31))
@settings(max_examples=examples(60), deadline=None)
def test_a_row_does_not_depend_on_the_rows_beside_it_nor_on_threads(shape: tuple[int, int, int], seed: int) -> None:
    count, inputs, outputs = shape
    rows, weight = random(seed, count, inputs), random(seed + 1, outputs, inputs)
    together = native.linear(rows, weight)
    for row in range(count):
        assert torch.equal(native.linear(rows[row : row + 1], weight)[0], together[row])


@pytest.mark.parametrize("rows", [31, 33, 70])
def test_many_long_rows_are_computed_as_each_alone(rows: int) -> None:
    """More than a block of them, which stays in the processor's cache."""
    inputs, outputs = 4096, 24
    x, weight, down = random(0, rows, inputs), random(1, outputs, inputs), random(2, inputs, outputs // 2)
    together, alone = native.linear(x, weight), torch.cat([native.linear(row[None], weight) for row in x])
    assert torch.equal(together, alone)
    out, tokens, scales = torch.zeros_like(x), list(range(rows))[::-1], [1.0] * rows
    expert(weight, down, x, tokens, scales, out, add=True)
    for row in range(rows):
        own = torch.zeros(1, inputs, dtype=torch.bfloat16)
        assert torch.equal(expert(weight, down, x[row : row + 1], [0], [1.0], own, add=True)[0], out[row])


def test_threads_change_nothing() -> None:
    rows, weight = random(0, 5, 1024), random(1, 777, 1024)
    experts = [(random(2 + e, 2 * 150, 1024) / 32, random(5 + e, 1024, 150)) for e in range(3)]
    tokens, scales, starts = np.array([4, 0, 1, 1, 3]), np.linspace(0.1, 1, 5, dtype=np.float32), np.array([0, 2, 3, 5])
    parts = {name: random(10 + n, 1024, 1024) for n, name in enumerate(("query", "key", "value", "output"))}
    norms = {name: random(15 + n, 1024) for n, name in enumerate(("before", "after"))}
    of = AttentionWeights(hidden=1024, dim=64, before_epsilon=1e-6, after_epsilon=1e-6)
    for name, tensor in parts.items():
        setattr(of, name, native.linear_weights(tensor))
    for name, tensor in norms.items():
        setattr(of, name, tensor.data_ptr())
    turns = random(20, 5, 64), random(21, 5, 64)

    def everything() -> list[torch.Tensor]:
        summed, stream = random(22, 5, 1024), random(23, 5, 1024)
        native.experts(experts, starts, rows, tokens, scales, summed, add=True)
        taken = native.before_attention(of, stream, *turns)
        normed = native.after_attention(of, taken[2].view(5, 1024), stream)
        return [native.linear(rows, weight), summed, *taken, stream, normed]

    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(everything())
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


@given(
    st.integers(1, 9), st.integers(1, 40).map(lambda n: 2 * n), st.integers(1, 150).map(lambda n: 2 * n),
    st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=examples(60), deadline=None)
def test_an_expert_is_transformers_eager_one_but_for_the_last_bits(
    count: int, hidden: int, inner: int, seed: int
) -> None:
    up, down, rows = random(seed, 2 * inner, hidden), random(seed + 1, hidden, inner), random(seed + 2, 12, hidden)
    up /= hidden**0.5  # gates of a few units: a rounding of a gate of -20 would be a large share of its silu
    tokens = torch.randperm(12, generator=torch.Generator().manual_seed(seed))[:count]
    scales = torch.rand(count, generator=torch.Generator().manual_seed(seed))
    gate, through = F.linear(rows[tokens].double(), up.double()).chunk(2, dim=-1)
    exact = F.linear(F.silu(gate) * through, down.double()) * scales[:, None].double()
    got = expert(up, down, rows, tokens.tolist(), scales.tolist(), torch.empty(count, hidden).bfloat16(), add=False)
    inside = (F.silu(gate) * through).abs() @ down.double().abs().T * scales[:, None].double()
    assert ((got.double() - exact).abs() <= inside * 2.0**-5 + 1e-6).all()


def test_adding_is_writing_and_then_adding_in_bf16() -> None:
    up, down, rows = random(0, 96, 32), random(1, 32, 48), random(2, 6, 32)
    tokens, scales = [4, 0, 3], [0.5, 0.25, 1.0]
    apart = expert(up, down, rows, tokens, scales, torch.empty(3, 32).bfloat16(), add=False)
    start = random(3, 6, 32)
    added = expert(up, down, rows, tokens, scales, start.clone(), add=True)
    assert torch.equal(added, start.clone().index_add_(0, torch.tensor(tokens), apart))
    assert torch.equal(added[[1, 2, 5]], start[[1, 2, 5]])


@given(st.lists(st.integers(1, 25), min_size=1, max_size=6), st.integers(0, 2**31), st.booleans())
@settings(max_examples=examples(40), deadline=None)
def test_experts_together_are_one_after_another(counts: list[int], seed: int, add: bool) -> None:
    hidden, inner, total = 34, 150, sum(counts)
    generator = torch.Generator().manual_seed(seed)
    rows = random(seed, total, hidden)
    weights = [(random(seed + e, 2 * inner, hidden), random(seed - e, hidden, inner)) for e in range(len(counts))]
    tokens = torch.randint(total, (total,), generator=generator).numpy()
    scales = torch.rand(total, generator=generator).numpy()
    starts = np.cumsum([0, *counts])
    apart, together = (random(seed, total, hidden) for _ in range(2))
    native.experts(weights, starts, rows, tokens, scales, together, add=add)
    for number, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
        into = apart if add else apart[start:end]
        own = np.array([0, end - start])
        native.experts([weights[number]], own, rows, tokens[start:end], scales[start:end], into, add=add)
    assert torch.equal(together, apart)


@given(
    st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), st.sampled_from(["none", "each", "all"]), st.booleans(),
    st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=examples(60), deadline=None)
def test_what_is_around_attention_is_its_parts_one_by_one(
    count: int, group: int, key_heads: int, norms: str, biased: bool, seed: int
) -> None:
    hidden, dim = 48, 32
    heads = {"query": group * key_heads, "key": key_heads, "value": key_heads}
    stream, cosines, sines = random(seed, count, hidden), random(seed + 1, count, dim), random(seed + 2, count, dim)
    held = {"before": random(seed + 3, hidden), "after": random(seed + 4, hidden)}
    projections: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
    projections["output"] = (random(seed + 17, hidden, heads["query"] * dim), None)
    of = AttentionWeights(hidden=hidden, dim=dim, before_epsilon=1e-6, after_epsilon=1e-5)
    for place, (name, number) in enumerate(heads.items()):
        width = number * dim
        bias = random(seed + 9 + place, width) if biased else None
        projections[name] = random(seed + 5 + place, width, hidden), bias
        if name != "value" and norms != "none":
            held[f"{name}_norm"] = random(seed + 13 + place, dim if norms == "each" else width)
            setattr(of, f"{name}_norm_width", len(held[f"{name}_norm"]))
            setattr(of, f"{name}_epsilon", 1e-6)
    for name, projection in projections.items():
        setattr(of, name, native.linear_weights(*projection))
    for name, tensor in held.items():
        setattr(of, name, tensor.data_ptr())

    normed = native.rms_norm(stream, held["before"], 1e-6)
    got = native.before_attention(of, stream, cosines, sines)
    for (name, number), tensor in zip(heads.items(), got, strict=True):
        expected = native.linear(normed, *projections[name])
        if (norm := held.get(f"{name}_norm")) is not None:
            expected = native.rms_norm(expected.view(-1, len(norm)), norm, 1e-6)
        expected = expected.view(count, number, dim)
        if name != "value":
            native.rotate(expected, cosines, sines)
        assert torch.equal(tensor, expected), name

    mixed, after = random(seed + 18, count, heads["query"] * dim), stream.clone()
    out = native.after_attention(of, mixed, after)
    assert torch.equal(after, stream + native.linear(mixed, *projections["output"]))
    assert torch.equal(out, native.rms_norm(after, held["after"], 1e-5))


@given(st.integers(1, 9), st.integers(1, 70), st.integers(0, 2**31))
@settings(max_examples=examples(40), deadline=None)
def test_added_rows_are_those_of_index_add(count: int, width: int, seed: int) -> None:
    drawn = np.random.default_rng(seed)
    out, rows = random(seed, 12, width), random(seed + 1, count, width)
    tokens = drawn.permutation(12)[:count]
    rows[0, 0] = float("nan")
    expected = out.clone().index_add_(0, torch.from_numpy(tokens), rows)
    native.add_rows(out, tokens, rows)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_the_environment_only_lowers_the_instruction_set() -> None:
    found = ("avx512", "avx2", "plain")
    assert lowered(found, None) == lowered(found, "") == lowered(found, "avx512bf16") == found
    assert lowered(found, "avx2") == ("avx2", "plain")
    with pytest.raises(InvalidConfig, match=r"GREENROOM_INSTRUCTIONS.*sse.*avx512bf16, avx512, avx2, plain"):
        lowered(found, "sse")
    with pytest.raises(NativeUnavailable, match="the slowest that is compiled is avx2"):
        lowered(("avx512", "avx2"), "plain")


def test_an_instruction_set_of_another_architecture_is_unknown() -> None:
    assert lowered(("neonbf16", "neon"), "neon") == lowered(("neon",), "neonbf16") == ("neon",)
    with pytest.raises(InvalidConfig, match=r"avx2.*allowed: neonbf16, neon$"):
        lowered(("neonbf16", "neon"), "avx2")
    with pytest.raises(InvalidConfig, match=r"neon.*allowed: avx512bf16, avx512, avx2, plain$"):
        lowered(("avx2", "plain"), "neon")


def test_all_instruction_sets_have_their_place_in_the_order() -> None:
    assert set(native.instruction_sets) <= set(ALL_INSTRUCTION_SETS)
    assert sorted(native.instruction_sets, key=ALL_INSTRUCTION_SETS.index) == list(native.instruction_sets)


def test_an_unknown_instruction_set_lists_the_known() -> None:
    with pytest.raises(InvalidConfig, match=native.instruction_sets[0]):
        native.use("abacus")


def test_extreme_gates_saturate_and_nan_stays() -> None:
    eye = torch.eye(2).bfloat16()
    up = torch.cat([eye, eye])
    rows = torch.tensor([[300.0, -300.0], [float("inf"), 1.0], [float("nan"), 1.0]]).bfloat16()
    got = expert(up, eye, rows, [0, 1, 2], [1.0] * 3, torch.empty(3, 2).bfloat16(), add=False)
    assert torch.equal(got[0], (F.silu(rows[0]) * rows[0]).nan_to_num(0.0))
    assert got[1, 0].isnan() or got[1, 0].isinf()
    assert got[2, 0].isnan()


@given(st.integers(1, 5), st.integers(1, 300), st.integers(0, 2**31))
@settings(max_examples=examples(40), deadline=None)
def test_a_norm_is_the_llama_one(count: int, width: int, seed: int) -> None:
    rows, weight = random(seed, count, width), random(seed + 1, width)
    wide = rows.float()
    expected = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
    got = native.rms_norm(rows, weight, 1e-6)
    assert ((got.float() - expected.float()).abs() <= expected.float().abs() * 2.0**-6).all()
    assert (got == expected).float().mean() > 0.9


class Memory:
    """Keys and values of one sequence, as the batch loop keeps them: ``[heads, capacity, dim]``."""

    def __init__(self, seed: int, heads: int, capacity: int, dims: tuple[int, int], length: int, first: int) -> None:
        self.keys, self.values = random(seed, heads, capacity, dims[0]), random(seed + 1, heads, capacity, dims[1])
        self.capacity, self.length, self.first = capacity, length, first

    def row(self, number: int) -> tuple[int, ...]:
        return number, self.keys.data_ptr(), self.values.data_ptr(), self.capacity, self.length, self.first


@given(
    st.lists(st.tuples(st.integers(0, 70), st.integers(0, 1)), min_size=1, max_size=4),
    st.sampled_from([(1, 1), (2, 1), (2, 3), (4, 2)]),
    st.sampled_from([(32, 32), (64, 32), (96, 128)]),
    st.integers(0, 2**31),
)
@settings(max_examples=examples(40), deadline=None)
def test_attention_of_single_rows_is_sdpa_over_each_sequence(
    sequences: list[tuple[int, int]], heads: tuple[int, int], dims: tuple[int, int], seed: int
) -> None:
    (key_heads, group), (key_dim, value_dim), rows = heads, dims, 2 * len(sequences)
    memories = [
        Memory(seed + 10 * i, key_heads, length + 3, dims, length, length // 2 if late else 0)
        for i, (length, late) in enumerate(sequences)
    ]
    query = random(seed + 1, rows, key_heads * group, key_dim)
    keys = random(seed + 2, key_heads, rows, key_dim).transpose(0, 1)  # as modules have them, heads first
    values = random(seed + 3, rows, key_heads, value_dim)
    at = np.array([memory.row(2 * i + 1) for i, memory in enumerate(memories)], dtype=np.int64)
    out = torch.full((rows, key_heads * group, value_dim), 7.0).bfloat16()
    scale = key_dim**-0.5
    untouched = [(memory.keys[:, memory.length + 1 :].clone(), memory.keys[:, : memory.length].clone())
                 for memory in memories]  # fmt: skip
    native.attention(query, keys, values, at, out, scale)
    for i, memory in enumerate(memories):
        row, stop = 2 * i + 1, memory.length + 1
        assert torch.equal(memory.keys[:, memory.length], keys[row])
        assert torch.equal(memory.values[:, memory.length], values[row])
        assert torch.equal(memory.keys[:, stop:], untouched[i][0])
        assert torch.equal(memory.keys[:, : stop - 1], untouched[i][1])
        own_keys = memory.keys[:, memory.first : stop].double().repeat_interleave(group, 0)
        own_values = memory.values[:, memory.first : stop].double().repeat_interleave(group, 0)
        expected = F.scaled_dot_product_attention(query[row][:, None].double(), own_keys, own_values, scale=scale)
        assert ((out[row].double() - expected[:, 0]).abs() <= expected[:, 0].abs() * 2.0**-8 + 1e-4).all()
        assert (out[row - 1] == 7).all(), "a row that was not named"
        alone = torch.empty_like(out)
        native.attention(query, keys, values, at[i : i + 1], alone, scale)
        assert torch.equal(alone[row], out[row])


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=3), st.integers(0, 2**31))
@settings(max_examples=examples(40), deadline=None)
def test_attention_of_several_rows_of_a_sequence_is_causal(sequences: list[tuple[int, int]], seed: int) -> None:
    """``sequences``: how many rows were there before, how many come."""
    key_heads, group, dim, total = 2, 2, 32, sum(count for _, count in sequences)
    query, keys, values = (
        random(seed + n, total, heads, dim) for n, heads in enumerate((key_heads * group, key_heads, key_heads))
    )
    memories = [
        Memory(seed + 10 * n, key_heads, before + count, (dim, dim), before, 0)
        for n, (before, count) in enumerate(sequences)
    ]
    table: list[list[int]] = []
    starts = []
    for memory, (before, count) in zip(memories, sequences, strict=True):
        starts.append(len(table))
        place = [memory.keys.data_ptr(), memory.values.data_ptr(), before + count]
        table += [[len(table) + i, *place, before + i, 0] for i in range(count)]
    out = torch.empty(total, key_heads * group, dim).bfloat16()
    native.attention(query, keys, values, np.array(table, dtype=np.int64), out, dim**-0.5)
    for start, memory, (before, count) in zip(starts, memories, sequences, strict=True):
        own = slice(start, start + count)
        assert torch.equal(memory.keys[:, before : before + count], keys[own].transpose(0, 1))
        sees = torch.ones(count, before + count, dtype=torch.bool).tril(before)
        k, v = (part[:, : before + count].double().repeat_interleave(group, 0) for part in (memory.keys, memory.values))
        expected = F.scaled_dot_product_attention(query[own].transpose(0, 1).double(), k, v, attn_mask=sees)
        expected = expected.transpose(0, 1)
        assert ((out[own].double() - expected).abs() <= expected.abs() * 2.0**-8 + 1e-4).all()


@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=3),
    st.sampled_from([(1, 1), (2, 3), (1, 8), (2, 5)]),
    st.sampled_from([(32, 32), (64, 96), (96, 32)]),
    st.sampled_from([None, 1, 7, 30]),
    st.booleans(),
    st.integers(0, 2**31),
)
@settings(max_examples=examples(60), deadline=None)
def test_a_row_attends_alike_in_any_chunk(
    sequences: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    window: int | None,
    with_sinks: bool,
    seed: int,
) -> None:
    """``sequences``: how many rows were there before, how many come. All at once, one at a time, and as sdpa has it."""
    (key_heads, group), (key_dim, value_dim), total = heads, dims, sum(count for _, count in sequences)
    query = random(seed, total, key_heads * group, key_dim)
    keys, values = random(seed + 1, total, key_heads, key_dim), random(seed + 2, total, key_heads, value_dim)
    sinks = random(seed + 3, key_heads * group) if with_sinks else None
    memories = [
        Memory(seed + 10 * n, key_heads, before + count, dims, before, 0) for n, (before, count) in enumerate(sequences)
    ]
    table: list[list[int]] = []
    for memory, (before, count) in zip(memories, sequences, strict=True):
        place = [memory.keys.data_ptr(), memory.values.data_ptr(), before + count]
        for own in range(before, before + count):
            table.append([len(table), *place, own, 0 if window is None else max(0, own - window + 1)])
    rows = np.array(table, dtype=np.int64)
    out, alone, twice = (torch.empty(total, key_heads * group, value_dim).bfloat16() for _ in range(3))
    native.attention(query, keys, values, rows, out, key_dim**-0.5, sinks=sinks)
    native.attention(query, keys, values, rows, twice, key_dim**-0.5, sinks=sinks, write=False)
    assert torch.equal(twice, out)
    for row in range(total):
        native.attention(query, keys, values, rows[row : row + 1], alone, key_dim**-0.5, sinks=sinks)
    assert torch.equal(alone, out)
    start = 0
    for memory, (before, count) in zip(memories, sequences, strict=True):
        here = slice(start, start + count)
        start += count
        sees = torch.ones(count, before + count, dtype=torch.bool).tril(before)
        if window is not None:
            sees &= ~torch.ones_like(sees).tril(before - window)
        k, v = (part.double().repeat_interleave(group, 0) for part in (memory.keys, memory.values))
        scores = query[here].transpose(0, 1).double() @ k.transpose(1, 2) * key_dim**-0.5
        scores = scores.masked_fill(~sees, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, count, 1)], dim=2)
        expected = (scores.softmax(dim=2)[..., : before + count] @ v).transpose(0, 1)
        assert ((out[here].double() - expected).abs() <= expected.abs() * 2.0**-8 + 1e-4).all()


def test_many_keys_take_smaller_tiles_and_give_the_same() -> None:
    """More scores than a tile may have: a tile of one row, of a few, and of all that there are."""
    for before in (3, 9_000, 70_000):
        memory = Memory(1, 1, before + 16, (32, 32), before, 0)
        query, keys, values = random(4, 16, 2, 32), random(5, 16, 1, 32), random(6, 16, 1, 32)
        place = [memory.keys.data_ptr(), memory.values.data_ptr(), before + 16]
        rows = np.array([[n, *place, before + n, 0] for n in range(16)], dtype=np.int64)
        out, alone = (torch.empty(16, 2, 32).bfloat16() for _ in range(2))
        native.attention(query, keys, values, rows, out, 0.2)
        for row in range(16):
            native.attention(query, keys, values, rows[row : row + 1], alone, 0.2)
        assert torch.equal(alone, out)


def test_a_row_that_is_no_number_spoils_no_earlier_row() -> None:
    memory = Memory(1, 1, 12, (32, 32), 0, 0)
    query, keys, values = random(4, 12, 1, 32), random(5, 12, 1, 32), random(6, 12, 1, 32)
    clean, out = (torch.empty(12, 1, 32).bfloat16() for _ in range(2))
    place = [memory.keys.data_ptr(), memory.values.data_ptr(), 12]
    rows = np.array([[n, *place, n, 0] for n in range(12)], dtype=np.int64)
    native.attention(query, keys, values, rows, clean, 0.2)
    for part in (keys, values):
        part[7] = torch.nan
    native.attention(query, keys, values, rows, out, 0.2)
    assert torch.equal(out[:7], clean[:7])
    assert out[7:].isnan().all()


@given(st.integers(1, 9), st.integers(1, 90), st.integers(1, 21), st.integers(0, 2**31))
@settings(max_examples=examples(60), deadline=None)
def test_a_product_of_floats_is_the_exact_one_and_alike_in_any_company(
    count: int, inputs: int, outputs: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, weight = (torch.randn(n, inputs, generator=generator) for n in (count, outputs))
    got = native.linear_floats(rows, weight)
    exact, largest = rows.double() @ weight.double().T, rows.double().abs() @ weight.double().abs().T
    assert ((got - exact).abs() <= largest * inputs * 2.0**-24).all()
    for row in range(count):
        assert torch.equal(native.linear_floats(rows[row : row + 1], weight)[0], got[row])
    assert torch.equal(native.linear_floats(rows, weight[: outputs // 2 + 1]), got[:, : outputs // 2 + 1])
