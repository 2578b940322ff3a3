"""The policy's decisions carried out: who is evicted, what is prefetched, what a layer waits for."""
