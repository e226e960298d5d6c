"""Pure tensor functions. In each folder `naive.py` is the definition, and all other forms must agree with it."""
