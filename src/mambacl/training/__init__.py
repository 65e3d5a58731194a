"""The training loop, the run folder, checkpoints and metrics."""
