"""Pages of the documentation that are made from stored results."""
