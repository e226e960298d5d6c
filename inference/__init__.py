"""What a trained model is used for: evaluation, benchmarks, sampling, conversation, serving."""
