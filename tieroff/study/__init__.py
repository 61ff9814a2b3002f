"""Compares policies, imports foreign profiles, partitions steps: for study and for the command line, never for training.

Nothing of the package but `tieroff.cli` imports it; a config that names a published policy is served by name
(`tieroff.planner.policies`).
"""
