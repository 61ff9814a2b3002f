"""Steps of models that transformers carries, trained as people do, from a configuration alone."""
