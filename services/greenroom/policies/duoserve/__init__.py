"""DuoServe-MoE (arXiv 2509.07379): prompts streamed, answers foreseen from each token's path through the layers."""
