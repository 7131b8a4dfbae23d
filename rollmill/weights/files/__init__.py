"""Weights as Hugging Face directories, and the files that belong to a model."""
