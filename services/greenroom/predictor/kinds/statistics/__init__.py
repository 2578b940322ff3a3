"""Statistics: how often each expert was picked and which pairs followed each other, counted as sequences come."""
