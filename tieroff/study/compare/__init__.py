"""Rows of policies beside each other and beside the bound, what would help, and how plans bear noise."""
