"""Which executor computes what next, and what is loaded meanwhile: decisions without threads, clocks or bytes."""
