"""Solvers for the choice of strategies: exact elimination, Tofu's recursion, and a search with a proven bound."""
