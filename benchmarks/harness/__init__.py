"""What all benchmarks stand on. It imports no benchmark, and as a package only the standard library."""
