"""What a worker runs: the run table, the leases of its schedulers, the ends that they are told."""
