"""The GPT: operators (`ops`), attention mechanisms, blocks, positions, and the model that puts them
in order."""
