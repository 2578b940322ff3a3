"""What is read from traces: counts of experts, and the last sequences."""
