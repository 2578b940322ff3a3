"""Headers that are greenroom's own, in replies over HTTP and in the initial metadata of RPCs."""

REPLY_ID_HEADER = "Greenroom-Request-Id"
HINTS_HEADER = "Greenroom-Without-Effect"
INFER_LENGTH_HEADER = "Inference-Header-Content-Length"
"""Of requests and replies below /v2: how many bytes of the body are JSON. Tensors in binary form follow."""
