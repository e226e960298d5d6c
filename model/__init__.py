"""The GPT: operators (`ops`), attention mechanisms, blocks, positions, and the model."""
