"""Images as they come, PNG or JPEG: checked before they are decoded, then decoded. Pillow, without torchvision."""

from __future__ import annotations

import io
from typing import Final

from PIL import Image, ImageOps, UnidentifiedImageError

from greenroom.core.errors import InvalidRequest

FORMATS: Final = ("PNG", "JPEG")
MAX_PIXELS: Final = 16_000_000
MAX_ASPECT: Final = 100
"""A longer strip is refused: processors scale the shorter side to a size of theirs, so it would become huge."""


def decode_image(data: bytes, name: str = "image", max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The upright image as RGB. ``name``: what errors call the input.

    Raises InvalidRequest if it is no whole PNG or JPEG. Or if it has more than ``max_pixels`` or is a long strip, which
    is found out before it is decoded.
    """
    image = _opened(data, name, max_pixels)
    try:
        return _eight_bits(ImageOps.exif_transpose(image)).convert("RGB")
    except Exception as error:  # the bytes are untrusted, so Pillow may raise anything
        raise _broken(name, error) from error


def check_image(data: bytes, name: str = "image", max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Its width and height as its header says, without decoding it. Raises as ``decode_image``, but not for what only
    decoding finds.
    """
    image = _opened(data, name, max_pixels)
    return image.width, image.height


def _opened(data: bytes, name: str, max_pixels: int) -> Image.Image:
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
