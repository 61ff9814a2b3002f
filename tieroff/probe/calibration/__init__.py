"""What a device at hand and the CPU beside it reach."""
