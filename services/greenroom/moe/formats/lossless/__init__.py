"""bf16 in fewer bytes without losing a bit: half a byte of exponent, or three planes of bits."""
