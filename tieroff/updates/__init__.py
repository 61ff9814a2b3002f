"""Updates of parameters in host memory, without PyTorch: rules, how they are rounded, and the threads that run them."""
