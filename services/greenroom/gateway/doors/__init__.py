"""Who may come in, and how much: keys, limits, admission, hosts."""
