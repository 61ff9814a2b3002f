"""Elementwise updates of large parameters, slice by slice."""
