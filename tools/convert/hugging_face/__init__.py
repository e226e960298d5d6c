"""Hugging Face formats of our models: GPT-2's own, and for any other model the code that an export
includes."""
