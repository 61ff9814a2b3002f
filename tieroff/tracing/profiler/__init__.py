"""What PyTorch's own profiler wrote of a training step, as a trace."""
