"""Converts checkpoints: to other checkpoints, and to and from the folders of Hugging Face's
transformers."""
