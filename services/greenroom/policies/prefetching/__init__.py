"""Prefetching by itself: the shared base, the papers' baselines, and look-ahead."""
