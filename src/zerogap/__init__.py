"""zerogap: true on-policy RL post-training, where trainer and rollout engine agree bit for bit."""

__version__ = "0.1.0"
