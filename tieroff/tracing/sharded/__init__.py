"""From a model to the graph of its step, with the ways in which torch's DTensor can split each operator."""
