"""Pure tensor functions. In each folder `naive.py` is the definition, and every other file must equal it."""
