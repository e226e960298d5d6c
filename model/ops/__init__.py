"""Pure tensor functions. An operator's naive form is its definition; all forms must agree."""
