"""The operators' Triton kernels. Imported only when one of them runs, because Triton is optional."""
