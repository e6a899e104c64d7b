"""coterie: reinforcement-learning post-training for language models that learn together."""

__version__ = "0.1.0"
