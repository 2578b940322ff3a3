"""greenroom beside llama.cpp: `python -m benchmarks.peers`."""
