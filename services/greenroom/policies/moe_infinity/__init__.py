"""MoE-Infinity: prefetching and replacement by the activation of each running sequence."""
