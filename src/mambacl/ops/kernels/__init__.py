"""The Triton side of the operators: imported only where a kernel runs."""
