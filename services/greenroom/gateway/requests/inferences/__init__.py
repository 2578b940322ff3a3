"""Open Inference Protocol: from a call's tensors to inferences."""
