"""Tensors between bytes and values, images' heads, and infer bodies: what comes out is what went in."""

from __future__ import annotations

import base64
import json
import struct
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core import bytes_tensors
from greenroom.core.errors import InvalidRequest
from greenroom.core.inference_outputs import Box, InferenceOutputs
from greenroom.gateway.grpc.open_inference import infer_call_of
from greenroom.gateway.replies.output_tensors import output_tensors
from greenroom.gateway.requests.inferences.image_size import image_size
from greenroom.gateway.requests.inferences.infer_body import decode_infer
from greenroom.gateway.requests.inferences.json_values import has_more_values
from greenroom.v1 import open_inference_pb2 as pb
from tests.pipeline.inferences.images import jpeg, png

MOST = 128
Elements = st.lists(st.binary(max_size=40), max_size=12)


@given(Elements)
def test_bytes_tensors_come_back(elements: list[bytes]) -> None:
    assert bytes_tensors.split(bytes_tensors.join(elements)) == elements


@given(Elements.filter(bool), st.data())
def test_a_cut_tensor_is_no_other_tensor(elements: list[bytes], data: st.DataObject) -> None:
    raw = bytes_tensors.join(elements)
    cut = raw[: data.draw(st.integers(0, len(raw) - 1))]
    try:
        assert bytes_tensors.split(cut) == elements[: len(bytes_tensors.split(cut))], "cut between two elements"
    except ValueError as error:
        assert "element" in str(error)  # noqa: PT017


@given(st.lists(Elements, min_size=1, max_size=4), st.text(max_size=10))
def test_an_infer_body_with_tensors_in_binary_form_comes_back(tensors: list[list[bytes]], name: str) -> None:
    raws = [bytes_tensors.join(elements) for elements in tensors]
    inputs = [
        {
            "name": f"{name}{place}",
            "shape": [len(elements), 1],
            "datatype": "BYTES",
            "parameters": {"binary_data_size": len(raw)},
        }
        for place, (elements, raw) in enumerate(zip(tensors, raws, strict=True))
    ]
    head = json.dumps({"id": name, "inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    call = decode_infer(b"".join((head, *raws)), len(head), MOST)
    assert [list(one.elements) for one in call.inputs] == tensors
    assert [one.shape for one in call.inputs] == [(len(elements), 1) for elements in tensors]
    assert (call.id, call.binary, dict(call.parameters)) == (name, True, {})


@given(Elements)
def test_so_it_does_as_base64_in_json(elements: list[bytes]) -> None:
    tensor = {
        "name": "image",
        "shape": [len(elements)],
        "datatype": "BYTES",
        "parameters": {"content_type": "base64"},
        "data": [base64.b64encode(one).decode() for one in elements],
    }
    call = decode_infer(json.dumps({"inputs": [tensor]}).encode(), None, MOST)
    assert list(call.inputs[0].elements) == elements


def test_nested_and_flat_data_are_the_same() -> None:
    def of(data: Any) -> tuple[bytes, ...]:
        tensor = {"name": "text", "shape": [2, 1], "datatype": "BYTES", "data": data}
        return decode_infer(json.dumps({"inputs": [tensor]}).encode(), None, MOST).inputs[0].elements

    assert of(["ä", "b"]) == of([["ä"], ["b"]]) == ("ä".encode(), b"b")


@pytest.mark.parametrize("dimensions", [300, 10_000])
def test_a_shape_of_many_dimensions_is_refused_without_multiplying_them(dimensions: int) -> None:
    tensor = {"name": "image", "shape": [2**63 - 1] * dimensions, "datatype": "BYTES", "data": ["x"]}
    with pytest.raises(InvalidRequest, match=rf"'image' has {dimensions} dimensions; send \[N\]"):
        decode_infer(json.dumps({"inputs": [tensor]}).encode(), None, MOST)


@pytest.mark.parametrize("shape", [[129], [10**4000], [10**4000] * 8, [2, 65], [129, 1]])
def test_a_shape_of_more_than_a_batch_is_refused(shape: list[int]) -> None:
    tensor = {"name": "image", "shape": shape, "datatype": "BYTES", "data": ["x"]}
    with pytest.raises(InvalidRequest, match="a batch has 1 to 128 elements, not ") as caught:
        decode_infer(json.dumps({"inputs": [tensor]}).encode(), None, MOST)
    assert len(str(caught.value)) < 200


JsonValues = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.sampled_from('a"\\\\,[]{}: ä')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('b"\\\\,[')), inner),
    max_leaves=20,
)


def values_in(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + values_in(one) for one in value.values())
    return 1 + (sum(map(values_in, value)) if isinstance(value, list) else 0)


@given(JsonValues, st.booleans(), st.sampled_from([None, 2]))
def test_values_are_counted_as_they_are_decoded(value: Any, as_ascii: bool, indent: int | None) -> None:
    text, count = json.dumps(value, ensure_ascii=as_ascii, indent=indent).encode(), values_in(value)
    assert not has_more_values(text, count)
    assert has_more_values(text, count - 1)


@given(st.binary(max_size=60), st.integers(0, 20))
def test_any_bytes_have_some_number_of_values(text: bytes, most: int) -> None:
    assert has_more_values(text, most) <= (len(text) > most)


def test_a_string_of_escapes_is_one_value() -> None:
    assert not has_more_values(b'["' + rb"\n\"" * 300_000 + b'"]', 2)
    assert has_more_values(b'["' + rb"\n\"" * 300_000 + b'", 1]', 2)


def taken(decode: Any) -> int:
    """Bytes that refusing it takes at most."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match=r"(1 to|behind) 128 elements|128 elements, and 500000 came"):
            decode()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("said", [MOST, 500_000], ids=["more than it says", "as it says"])
@pytest.mark.parametrize("element", ['""', "[]", "{}", "1", '["\\\\"]'])
def test_many_tiny_elements_are_refused_before_they_take_memory(element: str, said: int) -> None:
    data = f"[{','.join([element] * 500_000)}]"
    raw = f'{{"inputs": [{{"name": "image", "shape": [{said}], "datatype": "BYTES", "data": {data}}}]}}'.encode()
    assert taken(lambda: decode_infer(raw, None, MOST)) < len(raw) / 2


@pytest.mark.parametrize("said", [MOST, 500_000], ids=["more than it says", "as it says"])
def test_so_they_are_in_the_binary_form_and_over_grpc(said: int) -> None:
    raw = bytes(4 * 500_000)
    tensor = {"name": "image", "shape": [said], "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}}
    head = json.dumps({"inputs": [tensor]}).encode()
    whole = head + raw
    assert taken(lambda: decode_infer(whole, len(head), MOST)) < 3 * len(raw)  # the parts that are cut out of it
    asked = pb.ModelInferRequest()
    one = asked.inputs.add(name="image", shape=[said], datatype="BYTES")
    asked.raw_input_contents.append(raw)
    assert taken(lambda: infer_call_of(asked, MOST)) < 3 * len(raw)
    asked.ClearField("raw_input_contents")
    one.contents.bytes_contents.extend([b""] * 500_000)
    assert taken(lambda: infer_call_of(asked, MOST)) < 100_000


@given(st.binary(max_size=200), st.none() | st.integers(0, 250))
def test_no_body_is_more_than_refused(raw: bytes, length: int | None) -> None:
    with pytest.raises(InvalidRequest):
        decode_infer(raw, length, MOST)


@pytest.mark.parametrize("make", [png, jpeg])
@given(width=st.integers(1, 65_535), height=st.integers(1, 65_535))
def test_the_size_of_an_image_is_in_its_head(make: Any, width: int, height: int) -> None:
    assert image_size(make(width, height)) == (width, height)


@pytest.mark.parametrize("make", [png, jpeg])
def test_a_head_that_is_cut_or_empty_is_no_image(make: Any) -> None:
    whole = make(640, 480)
    least = next(length for length in range(len(whole) + 1) if image_size(whole[:length]) is not None)
    assert all(image_size(whole[:length]) == (640, 480) for length in range(least, len(whole) + 1))
    assert image_size(make(0, 480)) is None
    assert image_size(b"") is image_size(b"GIF89a") is image_size(b"\xff\xd8\xff\xda\x00\x08") is None


@pytest.mark.parametrize("filler", [b"\xff", b"\xff\x01", b"\xff\xe0\x00\x02"])
def test_a_head_of_thousands_of_markers_is_no_image(filler: bytes) -> None:
    begin, rest = jpeg(640, 480)[:2], jpeg(640, 480)[2:]
    assert image_size(begin + filler * 1_000 + rest) == (640, 480)
    assert image_size(begin + filler * 10_000 + rest) is None


@given(st.binary(max_size=60))
def test_looking_at_any_bytes_ends(tail: bytes) -> None:
    for head in (b"\xff\xd8", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"):
        size = image_size(head + tail)
        assert size is None or min(size) > 0


def _encoded(found: list[InferenceOutputs], name: str) -> Any:
    (tensor,) = output_tensors([name], found)
    size = 1
    for length in tensor.shape:
        size *= length
    assert size == len(tensor.values)
    if tensor.datatype == "BYTES":
        assert bytes_tensors.split(tensor.raw()) == [str(value).encode() for value in tensor.values]
    else:
        values = struct.unpack(f"<{size}{'f' if tensor.datatype == 'FP32' else 'i'}", tensor.raw())
        assert list(values) == pytest.approx(list(tensor.values))
    return tensor.shape, list(tensor.values)


def test_rows_of_unequal_length_are_filled_up() -> None:
    found = [
        InferenceOutputs(path=("a", "b"), label="x", score=0.5, boxes=(Box("x", 0.5, 1, 2, 3, 4),)),
        InferenceOutputs(path=("c",), embedding=struct.pack("<2f", 0.25, 0.5), scores=(("y", 0.25),)),
    ]
    assert _encoded(found, "path") == ((2, 2), ["a", "b", "c", ""])
    assert _encoded(found, "label") == ((2,), ["x", ""])
    assert _encoded(found, "score") == ((2,), [0.5, 0.0])
    assert _encoded(found, "boxes") == ((2, 1, 4), [1, 2, 3, 4, 0, 0, 0, 0])
    assert _encoded(found, "box_labels") == ((2, 1), ["x", ""])
    assert _encoded(found, "box_counts") == ((2,), [1, 0])
    assert _encoded(found, "embedding") == ((2, 2), [0.0, 0.0, 0.25, 0.5])
    assert _encoded(found, "labels") == ((2, 1), ["", "y"])
    assert _encoded(found, "scores") == ((2, 1), [0.0, 0.25])


def test_nothing_found_is_an_empty_tensor() -> None:
    assert _encoded([InferenceOutputs()] * 3, "boxes") == ((3, 0, 4), [])
    assert _encoded([InferenceOutputs()] * 3, "embedding") == ((3, 0), [])
