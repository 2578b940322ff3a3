"""The compiled products as an ARM machine computes them, under qemu's user mode."""
