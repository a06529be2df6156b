"""One decoder definition for engine and trainer, and its Hugging Face checkpoints."""
