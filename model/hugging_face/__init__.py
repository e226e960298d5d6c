"""Hugging Face's form of our models: GPT-2's own, and for all others the code that an exported folder brings along."""
