"""Carries out the policy's decisions: what is evicted, what is prefetched, what a layer waits for."""
