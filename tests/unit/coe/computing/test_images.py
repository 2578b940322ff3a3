from __future__ import annotations

import contextlib
import io
import struct
import tracemalloc
import warnings
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.image_utils import SizeDict

from greenroom.coe.computing.images import check_image, decode_image, largest_image
from greenroom.core.errors import InvalidRequest
from tests.examples import examples
from tests.random_experts import encoded, random_image


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_an_image(kind: str) -> None:
    image = random_image(width=31, height=17)
    decoded = decode_image(encoded(image, kind))
    assert (decoded.mode, decoded.size) == ("RGB", (31, 17))
    assert check_image(encoded(image, kind)) == (31, 17)
    if kind == "PNG":
        assert np.array_equal(np.asarray(decoded), np.asarray(image))


@pytest.mark.parametrize(
    ("size", "largest"),
    [
        ({"shortest_edge": 800, "longest_edge": 1333}, (1333, 800)),
        ({"shortest_edge": 800, "longest_edge": 600}, (600, 600)),
        ({"shortest_edge": 40}, (40, 40)),
        ({"longest_edge": 50}, (50, 50)),
        ({"height": 8, "width": 12}, (12, 8)),
        ({"max_height": 8, "max_width": 12}, (12, 8)),
        (SizeDict(shortest_edge=32, longest_edge=48), (48, 32)),
        (SizeDict(height=8, width=12), (12, 8)),
        (32, (32, 32)),
        (None, (224, 224)),
        ({"height": "8"}, (224, 224)),
    ],
)
def test_the_image_of_which_a_processor_makes_most(size: object, largest: tuple[int, int]) -> None:
    assert largest_image(size) == largest


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "I;16"])
def test_other_modes_become_rgb(mode: str) -> None:
    assert decode_image(encoded(Image.new(mode, (8, 9)))).mode == "RGB"


def test_grey_of_sixteen_bits_keeps_its_shades() -> None:
    grey = np.linspace(0, 65_535, 31 * 17).reshape(17, 31).astype(np.uint16)
    decoded = np.asarray(decode_image(encoded(Image.fromarray(grey))))
    assert np.array_equal(decoded, np.repeat((grey >> 8).astype(np.uint8)[..., None], 3, axis=2))


def test_an_image_that_lies_on_its_side_is_turned() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    file = io.BytesIO()
    random_image(width=31, height=17).save(file, "JPEG", exif=exif)
    assert decode_image(file.getvalue()).size == (17, 31)


def png_with(kind: bytes, data: bytes) -> bytes:
    """An image of random pixels with one more chunk before them."""
    whole = encoded(random_image())
    chunk = struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return whole[:33] + chunk + whole[33:]


@pytest.mark.parametrize(
    ("kind", "data"),
    [(b"eXIf", b"\xff\xd8no TIFF"), (b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(b"\nexif\n 4\nzzzz"))],
)
def test_pixels_with_broken_metadata_are_taken_as_they_lie(kind: bytes, data: bytes) -> None:
    assert np.array_equal(np.asarray(decode_image(png_with(kind, data))), np.asarray(random_image()))


def test_values_that_many_tags_point_at_are_there_once() -> None:
    tags, value = 1000, bytes(300_000)
    entries = b"".join(struct.pack(">HHII", 1 + tag, 7, len(value), 14 + 12 * tags) for tag in range(tags))
    exif = b"MM\0*\0\0\0\x08" + struct.pack(">H", tags) + entries + bytes(4) + value
    data = png_with(b"eXIf", exif)
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            decode_image(data)
        assert tracemalloc.get_traced_memory()[1] < 10 * len(data)
    finally:
        tracemalloc.stop()


def test_texts_of_an_image_are_bounded() -> None:
    text = b"Comment\0\0" + zlib.compress(bytes(900_000))
    one = struct.pack(">I", len(text)) + b"zTXt" + text + struct.pack(">I", zlib.crc32(b"zTXt" + text))
    whole = encoded(random_image())
    assert decode_image(whole[:33] + one + whole[33:]).size == random_image().size
    with pytest.raises(InvalidRequest, match="text"):
        decode_image(whole[:33] + one + one + whole[33:])


def test_a_jpeg_of_very_many_scans_is_refused_before_it_is_decoded() -> None:
    """Each takes as long as the whole image, and a few bytes."""
    file = io.BytesIO()
    random_image().save(file, "JPEG", progressive=True)
    data = file.getvalue()
    assert decode_image(data).size == random_image().size
    scan = data[data.rindex(b"\xff\xda") : -2]
    with pytest.raises(InvalidRequest, match=r"photo has 1\d\d scans; at most 100 are taken"):
        decode_image(data[:-2] + 100 * scan + data[-2:], "photo")


def png_that_claims(width: int, height: int) -> bytes:
    """A header and no pixels: what is looked at before decoding."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))


@pytest.mark.parametrize(("width", "height"), [(101, 100), (20_000, 20_000), (2**31 - 1, 2**31 - 1)])
def test_too_many_pixels_are_refused_before_they_are_decoded(width: int, height: int) -> None:
    with pytest.raises(InvalidRequest, match=r"photo has .* pixels; at most 10000 are taken") as refused:
        decode_image(png_that_claims(width, height), "photo", max_pixels=10_000)
    assert (refused.value.param, refused.value.code) == ("photo", "image_too_large")


def test_a_long_strip_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="photo has 2 × 201 pixels; one side may be 100 times"):
        decode_image(encoded(random_image(width=2, height=201)), "photo")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no image",
        b"\x89PNG\r\n\x1a\n",
        encoded(random_image())[:300],
        encoded(random_image(), "JPEG")[:300],
        encoded(random_image(), "GIF"),
    ],
    ids=["empty", "text", "header", "half a PNG", "half a JPEG", "GIF"],
)
def test_what_is_no_image_is_named(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"photo (is empty|can not be decoded as PNG or JPEG)") as refused:
        decode_image(data, "photo")
    assert refused.value.param == "photo"
    assert "object at" not in str(refused.value)


@given(st.integers(0, 2_000), st.integers(1, 255), st.sampled_from(["PNG", "JPEG"]))
@settings(max_examples=examples(60), deadline=None)
def test_altered_bytes_give_an_image_or_an_error(place: int, by: int, kind: str) -> None:
    data = bytearray(encoded(random_image(), kind))
    data[place % len(data)] ^= by
    with contextlib.suppress(InvalidRequest):
        assert decode_image(bytes(data), max_pixels=10_000).mode == "RGB"
