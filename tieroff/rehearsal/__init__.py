"""Rehearsals: a user's own training script, with the real engine, on a GPU that is not there; docs/rehearsing.md."""
