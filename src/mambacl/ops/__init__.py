"""The operators and their kernels."""
