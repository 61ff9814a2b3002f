"""What the scripts and the benchmarks share."""
