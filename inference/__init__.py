"""What is done with a trained model: evaluation, lm-evaluation-harness, sampling, conversation, and the server."""
