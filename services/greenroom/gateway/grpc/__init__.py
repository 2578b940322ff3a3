"""The public RPCs, greenroom.v1.Inference."""
