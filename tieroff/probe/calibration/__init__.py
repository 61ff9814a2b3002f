"""What a device at hand reaches, for the clock of a model that never ran."""
