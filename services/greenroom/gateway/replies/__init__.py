"""From what is generated to what a client is told."""
