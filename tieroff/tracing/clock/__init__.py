"""What ops take on a GPU that is not at hand: a model of its kernels, fitted to steps that others measured."""
