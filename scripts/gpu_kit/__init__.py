"""What `scripts/gpu_evidence.py` runs: its rows, the models they train, and the ways in which they train them."""
