"""From checkpoints to others, and to and from the folders of Hugging Face's transformers."""
