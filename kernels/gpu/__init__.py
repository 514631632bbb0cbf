"""Triton kernels; each has its torch twin one folder up."""
