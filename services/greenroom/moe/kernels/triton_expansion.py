"""Records become numbers on a GPU: one launch for several experts, both matrices of each.

Imported only where the device is CUDA (``expert_ring.py``), since it needs Triton. ``TRITON_INTERPRET=1`` at the import
runs it on the CPU, without a GPU, one program after the other.

A program makes a *tile* of one matrix: of formats that lie in panels the 32 outputs of a panel by 128 inputs, of
lossless bf16 eight rows by 512 columns. How a tile's bytes become numbers is a function a format, chosen when the
kernel is compiled; the formats' own modules describe the bytes. All numbers are float32 until they are stored.

Results are those of ``ExpertFormat.expand`` to the bit. A product of a code and a scale is rounded once, or is exact,
in the same order as there. What is subtracted is exact on both sides, so a fused multiplication would change nothing;
the launch forbids it all the same. Numbers of bf16 are rounded by their bits: to the nearest, ties to even.
"""

import triton
import triton.language as tl

PANEL: tl.constexpr = tl.constexpr(32)
INPUTS_AT_ONCE: tl.constexpr = tl.constexpr(128)
STRIP: tl.constexpr = tl.constexpr(8)
COLUMNS_AT_ONCE: tl.constexpr = tl.constexpr(512)
ENTRIES_AT_ONCE: tl.constexpr = tl.constexpr(128)
SUPER: tl.constexpr = tl.constexpr(256)
HALFS_BYTES: tl.constexpr = tl.constexpr(64)
"""Of a K-quant: inputs that share numbers of half precision, and the bytes of those of a panel."""


@triton.jit(do_not_specialize=[f"record_{n}" for n in range(8)])
def expand_experts(
    record_0, record_1, record_2, record_3, record_4, record_5, record_6, record_7, numbers,
    PLACE: tl.constexpr, BFLOAT: tl.constexpr, UP_TILES: tl.constexpr,
    UP_KIND: tl.constexpr, UP_OUTPUTS: tl.constexpr, UP_INPUTS: tl.constexpr, UP_JOINED: tl.constexpr,
    UP_GROUP: tl.constexpr, UP_CODES: tl.constexpr, UP_SCALES: tl.constexpr, UP_LESS: tl.constexpr,
    UP_ORDER: tl.constexpr, UP_AT: tl.constexpr,
    DOWN_KIND: tl.constexpr, DOWN_OUTPUTS: tl.constexpr, DOWN_INPUTS: tl.constexpr, DOWN_JOINED: tl.constexpr,
    DOWN_GROUP: tl.constexpr, DOWN_CODES: tl.constexpr, DOWN_SCALES: tl.constexpr, DOWN_LESS: tl.constexpr,
    DOWN_ORDER: tl.constexpr, DOWN_AT: tl.constexpr,
):  # fmt: skip
    """Grid: the tiles of both matrices, by experts.

    ``record_n``: the address of expert n's record (int64). ``numbers``: of the model's dtype, or int16 in the place of
    bf16 (``BFLOAT``); expert n's begin at ``n * PLACE``. Of each matrix: see ``expert_ring.CodedMatrix``.
    """
    tile, expert = tl.program_id(0), tl.program_id(1)
    address = tl.where(expert == 1, record_1, record_0)
    address = tl.where(expert == 2, record_2, address)
    address = tl.where(expert == 3, record_3, address)
    address = tl.where(expert == 4, record_4, address)
    address = tl.where(expert == 5, record_5, address)
    address = tl.where(expert == 6, record_6, address)
    address = tl.where(expert == 7, record_7, address)
    record = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
    into = numbers + expert.to(tl.int64) * PLACE
    if tile < UP_TILES:
        _tile(
            record, into + UP_AT, tile, BFLOAT,
            UP_KIND, UP_OUTPUTS, UP_INPUTS, UP_JOINED, UP_GROUP, UP_CODES, UP_SCALES, UP_LESS, UP_ORDER,
        )  # fmt: skip
    else:
        _tile(
            record, into + DOWN_AT, tile - UP_TILES, BFLOAT,
            DOWN_KIND, DOWN_OUTPUTS, DOWN_INPUTS, DOWN_JOINED, DOWN_GROUP, DOWN_CODES, DOWN_SCALES, DOWN_LESS,
            DOWN_ORDER,
        )  # fmt: skip


@triton.jit
def _tile(
    record, into, tile, BFLOAT: tl.constexpr,
    KIND: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, JOINED: tl.constexpr, GROUP: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, LESS: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    if KIND == "lossless":
        _lossless_tile(record + CODES, record + SCALES, into, tile, OUTPUTS, INPUTS)
    else:
        WIDTH: tl.constexpr = 16 if KIND == "q6_k" else 32
        UNITS: tl.constexpr = (INPUTS + WIDTH - 1) // WIDTH
        ACROSS: tl.constexpr = (INPUTS + INPUTS_AT_ONCE - 1) // INPUTS_AT_ONCE
        panel = tile // ACROSS
        lane = tl.arange(0, PANEL)[:, None, None]
        unit = tile % ACROSS * (INPUTS_AT_ONCE // WIDTH) + tl.arange(0, INPUTS_AT_ONCE // WIDTH)[None, :, None]
        inner = tl.arange(0, WIDTH)[None, None, :]
        there = unit < UNITS
        made = _panel_numbers(
            record, panel, lane, unit, inner, there, KIND, INPUTS, UNITS, GROUP, CODES, SCALES, LESS,
        )  # fmt: skip
        column = unit * WIDTH + inner
        present = column < INPUTS
        if KIND == "mxfp4":  # stored [inputs, outputs], of whole panels
            _store(into + column.to(tl.int64) * OUTPUTS + panel * PANEL + lane, made, present, BFLOAT)
        else:
            if ORDER >= 0:
                column = tl.load((record + ORDER).to(tl.pointer_type(tl.int32)) + column, mask=present, other=0)
            if JOINED:
                neuron = panel * (PANEL // 2) + lane % (PANEL // 2)
                present = present & (neuron < OUTPUTS // 2)
                row = neuron + lane // (PANEL // 2) * (OUTPUTS // 2)
            else:
                row = panel * PANEL + lane
                present = present & (row < OUTPUTS)
            _store(into + row.to(tl.int64) * INPUTS + column, made, present, BFLOAT)


@triton.jit
def _store(into, made, present, BFLOAT: tl.constexpr):
    if BFLOAT:
        bits = made.to(tl.uint32, bitcast=True)
        tl.store(into, ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).to(tl.int16), mask=present)
    else:
        tl.store(into, made.to(into.dtype.element_ty), mask=present)


# Formats in panels: numbers ``[32, units, inputs of a unit]`` in float32 -----------------------------------------


@triton.jit
def _panel_numbers(
    record, panel, lane, unit, inner, there, KIND: tl.constexpr, INPUTS: tl.constexpr, UNITS: tl.constexpr,
    GROUP: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, LESS: tl.constexpr,
):  # fmt: skip
    """``lane``, ``unit`` and ``inner`` are places along the three dimensions; units that are not ``there`` give any
    numbers."""
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP if GROUP > 0 else 1
    BYTE_CODES: tl.constexpr = KIND == "int8" or KIND == "fp8_blocks" or KIND == "fp8_rows"
    UNIT_BYTES: tl.constexpr = 384 if KIND == "q6_k" else (1024 if BYTE_CODES else 512)
    codes = record + CODES + panel.to(tl.int64) * (UNITS * UNIT_BYTES) + unit * UNIT_BYTES
    scales = record + SCALES
    group = unit * 32 // GROUP if GROUP > 0 else unit * 0
    place = panel * GROUPS + group
    if KIND == "mxfp4":
        scale = tl.load(scales + (panel * UNITS + unit) * 32 + lane % 2 * 16 + lane // 2, mask=there, other=0)
        code = _nibbles(codes, lane // 2, lane % 2, inner, there)
        made = _e2m1(code) * _e8m0(scale)
    elif KIND == "fp4":
        scale = tl.load(scales + place * 32 + lane, mask=there, other=0)
        made = _e2m1(_nibbles(codes, lane % 16, lane // 16, inner, there)) * _e8m0(scale)
    elif KIND == "fp8_blocks":
        made = _e4m3(_bytes(codes, lane, inner, there)) * _floats(scales, place * 2 + lane // 16, there)
    elif KIND == "fp8_rows":
        made = _e4m3(_bytes(codes, lane, inner, there)) * _floats(scales, place * 32 + lane, there)
    elif KIND == "int8":
        made = _signed(_bytes(codes, lane, inner, there), 128) * _halfs(scales, place * 32 + lane, there)
    elif KIND == "q4_k":
        scale = _six_bits(scales, panel, unit, lane, there, UNITS)
        code = _nibbles(codes, lane % 16, lane // 16, inner, there)
        made = scale * code.to(tl.float32) - _six_bits(record + LESS, panel, unit, lane, there, UNITS)
    elif KIND == "q6_k":
        low = _nibbles(codes, lane % 16, lane // 16, inner, there)
        high = _pairs_of_bits(codes + 256, lane % 16, lane // 16, inner, there)
        made = _eight_bits(scales, panel, unit, lane, there, UNITS) * ((low | high << 4) - 32).to(tl.float32)
    else:
        made = _signed(_nibbles(codes, lane % 16, lane // 16, inner, there), 8)
        if LESS >= 0:
            zero = tl.load(record + LESS + place * 16 + lane % 16, mask=there, other=0).to(tl.int32)
            made -= _signed(zero >> lane // 16 * 4 & 15, 8)
        if KIND == "int4_bfloats":
            made *= _bfloats(scales, place * 32 + lane, there)
        else:
            tl.static_assert(KIND == "int4_halfs", "codes of an unknown kind")
            made *= _halfs(scales, place * 32 + lane, there)
    return made


@triton.jit
def _bytes(codes, lane, inner, there):
    """For an input one byte of each output."""
    return tl.load(codes + inner * 32 + lane, mask=there, other=0).to(tl.int32)


@triton.jit
def _nibbles(codes, word, half, inner, there):
    """Words of 32 bits have four inputs of two outputs, the first one's in the lower halves of bytes."""
    byte = tl.load(codes + inner // 4 * 64 + word * 4 + inner % 4, mask=there, other=0).to(tl.int32)
    return byte >> half * 4 & 15


@triton.jit
def _pairs_of_bits(codes, word, half, inner, there):
    """Words of 32 bits have eight inputs of two outputs, in turns."""
    byte = tl.load(codes + inner // 8 * 64 + word * 4 + inner % 8 // 2, mask=there, other=0).to(tl.int32)
    return byte >> (inner % 2 * 4 + half * 2) & 3


@triton.jit
def _signed(code, MIDDLE: tl.constexpr):
    """Of two's complement."""
    return ((code ^ MIDDLE) - MIDDLE).to(tl.float32)


@triton.jit
def _e4m3(code):
    """Moved up, the code is a number of half precision 256 times smaller. NaN is none of a record's codes."""
    half = (code << 7 & 0x3F80 | code << 8 & 0x8000).to(tl.uint16).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 256.0


@triton.jit
def _e2m1(code):
    """Moved up, the code is a number of half precision 2 ** 14 times smaller."""
    half = (code << 9 & 0x0E00 | code << 12 & 0x8000).to(tl.uint16).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 16384.0


@triton.jit
def _e8m0(code):
    """``2 ** (code - 127)`` by its bits. The smallest has no exponent."""
    exponent = code.to(tl.uint32)
    return tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _floats(scales, place, there):
    return tl.load(scales.to(tl.pointer_type(tl.float32)) + place, mask=there, other=0.0)


@triton.jit
def _halfs(scales, place, there):
    return tl.load(scales.to(tl.pointer_type(tl.float16)) + place, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _bfloats(scales, place, there):
    bits = tl.load(scales.to(tl.pointer_type(tl.uint16)) + place, mask=there, other=0)
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _six_bits(scales, panel, unit, lane, there, UNITS: tl.constexpr):
    """Of Q4_K: a number of half precision, times six bits of each of eight groups."""
    BYTES: tl.constexpr = HALFS_BYTES + 8 * PANEL * 6 // 8
    block, group = panel * ((UNITS + 7) // 8) + unit // 8, unit % 8
    of_groups = scales + block * BYTES + HALFS_BYTES + lane
    low = tl.load(of_groups + group // 2 * PANEL, mask=there, other=0).to(tl.int32) >> group % 2 * 4 & 15
    high = tl.load(of_groups + (4 + group // 4) * PANEL, mask=there, other=0).to(tl.int32) >> group % 4 * 2 & 3
    return _halfs(scales, block * (BYTES // 2) + lane, there) * (low | high << 4).to(tl.float32)


@triton.jit
def _eight_bits(scales, panel, unit, lane, there, UNITS: tl.constexpr):
    """Of Q6_K: a number of half precision, times a signed byte of each of sixteen groups."""
    BYTES: tl.constexpr = HALFS_BYTES + 16 * PANEL
    block, group = panel * ((UNITS + 15) // 16) + unit // 16, unit % 16
    byte = tl.load(scales + block * BYTES + HALFS_BYTES + group * PANEL + lane, mask=there, other=0).to(tl.int32)
    return _halfs(scales, block * (BYTES // 2) + lane, there) * _signed(byte, 128)


# Lossless bf16 ---------------------------------------------------------------------------------------------------


@triton.jit
def _lossless_tile(codes, exponents, into, tile, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr):
    """A program also puts right those of its own weights that are listed. A barrier keeps its threads' writes in order;
    no weight is written by two programs, so no order is needed between these.
    """
    ACROSS: tl.constexpr = (INPUTS + COLUMNS_AT_ONCE - 1) // COLUMNS_AT_ONCE
    STRIPS: tl.constexpr = (OUTPUTS + STRIP - 1) // STRIP
    ROW_BYTES: tl.constexpr = INPUTS // 2 * 3
    strip = tile // ACROSS
    begins = tile % ACROSS * COLUMNS_AT_ONCE
    row = strip * STRIP + tl.arange(0, STRIP)[:, None, None]
    eight = begins // 8 + tl.arange(0, COLUMNS_AT_ONCE // 8)[None, :, None]
    inner = tl.arange(0, 8)[None, None, :]
    column = eight * 8 + inner
    present = (row < OUTPUTS) & (column < INPUTS)
    own = codes + row.to(tl.int64) * ROW_BYTES
    rest = tl.load(own + _lying(eight, inner, INPUTS), mask=present, other=0).to(tl.int32)
    turn = _turn(eight)
    at, shift = eight // 8 * 32 + turn % 4 * 8 + inner, turn // 4 * 4
    if INPUTS % 64 != 0:
        whole = column < INPUTS // 64 * 64
        at, shift = tl.where(whole, at, column // 2), tl.where(whole, shift, column % 2 * 4)
    place = tl.load(own + INPUTS + at, mask=present, other=0).to(tl.int32) >> shift & 15
    exponent = tl.load(exponents + place).to(tl.int32)
    tl.store(into + row.to(tl.int64) * INPUTS + column, _bfloat(rest, exponent), mask=present)
    tl.debug_barrier()
    words = exponents.to(tl.pointer_type(tl.int32)) + 4  # behind the table
    first = tl.load(words + strip - 1, mask=strip > 0, other=0)
    end = tl.load(words + strip)
    for some in range(first, end, ENTRIES_AT_ONCE):
        entry = some + tl.arange(0, ENTRIES_AT_ONCE)
        listed = tl.load(words + STRIPS + entry, mask=entry < end, other=0)
        place_in_row = listed & 0xFFFF
        mine = (entry < end) & (place_in_row >= begins) & (place_in_row < begins + COLUMNS_AT_ONCE)
        its_row = (strip * STRIP + (listed >> 16 & 0xFF)).to(tl.int64)
        byte = codes + its_row * ROW_BYTES + _lying(place_in_row // 8, place_in_row % 8, INPUTS)
        made = _bfloat(tl.load(byte, mask=mine, other=0).to(tl.int32), listed >> 24 & 0xFF)
        tl.store(into + its_row * INPUTS + place_in_row, made, mask=mine)


@triton.jit
def _lying(eight, inner, INPUTS: tl.constexpr):
    """Where a row has the byte of a column: ``inner`` of its ``eight``."""
    lying = eight // 8 * 64 + _turn(eight) * 8 + inner
    if INPUTS % 64 != 0:
        column = eight * 8 + inner
        lying = tl.where(column < INPUTS // 64 * 64, lying, column)
    return lying


@triton.jit
def _turn(eight):
    """Of eight groups of eight the first four and the last four take turns."""
    return eight % 4 * 2 + eight // 4 % 2


@triton.jit
def _bfloat(rest, exponent):
    """The bits of a number of bf16, of its sign and mantissa and its exponent."""
    return ((rest & 0x80) << 8 | rest & 0x7F | exponent << 7).to(tl.int16)
