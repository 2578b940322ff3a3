"""Images as they come, PNG or JPEG: checked before they are decoded, then decoded. Pillow, without torchvision."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from typing import Any, Final

from PIL import Image, ImageOps, PngImagePlugin, UnidentifiedImageError

from greenroom.core.errors import InvalidRequest
from greenroom.core.units import MIB

log = logging.getLogger(__name__)

PngImagePlugin.MAX_TEXT_MEMORY = MIB
"""Of an image's texts, which stay as long as it. Pillow would take 64 MiB, and four times that where they are wide."""

FORMATS: Final = ("PNG", "JPEG")
MAX_PIXELS: Final = 16_000_000
BYTES_A_PIXEL: Final = 20
"""Of an image that is decoded, turned, converted and scaled: 14 were measured, and allocators keep some."""
MOST_SCANS: Final = 100
"""Of a JPEG. Progressive ones have about ten. Each of an image of 16 million pixels takes some 10 ms to decode, and 32
bytes of a file, so a file of 4 MiB could hold an executor for many minutes.
"""
_SCAN: Final = b"\xff\xda"
_UNKNOWN_SIDE: Final = 224
MAX_ASPECT: Final = 100
"""A longer strip is refused: processors scale the shorter side to a size of theirs, so it would become huge."""


def decode_image(data: bytes, name: str = "image", max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The upright image as RGB. Raises as ``open_image`` and ``decoded``."""
    return decoded(open_image(data, name, max_pixels), name)


def decoded(image: Image.Image, name: str = "image") -> Image.Image:
    """What ``open_image`` gave, which it may change: upright and as RGB. Raises InvalidRequest if it is no whole PNG or
    JPEG.
    """
    try:
        image.load()
        _turn_upright(image)
        return image if image.mode == "RGB" else _eight_bits(image).convert("RGB")
    except Exception as error:  # the bytes are untrusted, so Pillow may raise anything
        raise _broken(name, error) from error


def _turn_upright(image: Image.Image) -> None:
    """What says how it lies may be broken while its pixels are whole: then it stays as it lies."""
    try:
        ImageOps.exif_transpose(image, in_place=True)  # a copy would take four bytes a pixel
    except MemoryError:
        raise
    except Exception as error:  # as with pixels, Pillow may raise anything
        log.debug("an image's metadata can not be read: %r", error)


def check_image(data: bytes, name: str = "image", max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Its width and height as its header says, without decoding it. Raises as ``open_image``."""
    image = open_image(data, name, max_pixels)
    return image.width, image.height


def decoded_bytes(max_pixels: int) -> int:
    """The most memory that an executor's images take while they are decoded and prepared, which is one by one. Measured
    on ResNet's, ViT's, MobileNet's, DETR's and YOLOS's own processors, it is less.
    """
    return BYTES_A_PIXEL * max_pixels


def largest_image(size: Any) -> tuple[int, int]:
    """Width and height of an image of which a processor of this ``size`` makes the most pixels.

    ``size``: as the image processors of transformers have it, a number or sides by name. One that keeps the aspect up
    to a ``longest_edge`` makes the most of an image that reaches both limits; which way it lies does not matter.
    """
    if isinstance(size, int):
        return max(1, size), max(1, size)
    given = dict(size) if isinstance(size, Mapping) or hasattr(size, "shortest_edge") else {}
    sides = {name: max(1, side) for name, side in given.items() if isinstance(side, int)}
    for width, height in (("width", "height"), ("max_width", "max_height")):
        if width in sides and height in sides:
            return sides[width], sides[height]
    longest = sides.get("longest_edge", sides.get("shortest_edge", _UNKNOWN_SIDE))
    return longest, min(longest, sides.get("shortest_edge", longest))


def open_image(data: bytes, name: str = "image", max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The image with its size, not decoded. ``name``: what errors call the input.

    Raises InvalidRequest if its head is that of no PNG or JPEG, if it has more than ``max_pixels`` or MOST_SCANS, or is
    a long strip.
    """
    if not data:
        raise InvalidRequest(f"{name} is empty; send a PNG or JPEG image", param=name, code="invalid_image")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_large(name, "more", max_pixels) from None
    except UnidentifiedImageError as error:  # it says only which object of Python it was
        raise _broken(name, "it is neither, or its head is broken") from error
    except Exception as error:  # the bytes are untrusted, so Pillow may raise anything
        raise _broken(name, error) from error
    if image.width * image.height > max_pixels:
        raise _too_large(name, f"{image.width} × {image.height}", max_pixels)
    if max(image.size) > MAX_ASPECT * min(image.size):
        raise InvalidRequest(
            f"{name} has {image.width} × {image.height} pixels; one side may be {MAX_ASPECT} times the other at most",
            param=name,
            code="invalid_image",
        )
    # Nowhere else in what is decoded do these bytes follow each other; by chance they do in other data, once in 64 KiB.
    if image.format != "PNG" and (scans := data.count(_SCAN)) > MOST_SCANS:
        raise InvalidRequest(
            f"{name} has {scans} scans; at most {MOST_SCANS} are taken: save it anew", param=name, code="invalid_image"
        )
    return image


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey of 16 bits to 8, by its upper byte, as Pillow reads colours of 16. Its own conversion makes all from 256 on
    white.
    """
    return image.point(lambda value: value / 256).convert("L") if image.mode.startswith("I;16") else image


def _too_large(name: str, size: str, max_pixels: int) -> InvalidRequest:
    return InvalidRequest(
        f"{name} has {size} pixels; at most {max_pixels} are taken: scale it down", param=name, code="image_too_large"
    )


def _broken(name: str, error: Exception | str) -> InvalidRequest:
    return InvalidRequest(f"{name} can not be decoded as PNG or JPEG: {error!s:.200}", param=name, code="invalid_image")
