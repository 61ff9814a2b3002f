"""What PyTorch's own profiler wrote of a training step, and other files, as a trace."""
