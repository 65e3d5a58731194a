"""The training loop, checkpoints and progress."""
