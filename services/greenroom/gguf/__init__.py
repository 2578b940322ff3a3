"""GGUF, llama.cpp's file of a model: header, metadata and tensors' places. Without torch; no weights are read."""
