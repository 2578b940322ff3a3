"""What a worker runs and for whom: leases, the run table, its ends."""
