"""Pure tensor functions. The naive form of an operator is its definition: all other forms must
agree with it."""
