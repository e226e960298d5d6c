"""Scaling laws: how the loss depends on parameters and tokens, fitted to runs."""
