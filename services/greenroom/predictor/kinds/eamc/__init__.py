"""Expert activation matrix collections: chosen from the routing of many sequences (MoE-Infinity, §4.2)."""
