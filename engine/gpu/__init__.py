"""The runner of CUDA devices: Triton kernels over preallocated memory, replayed from CUDA graphs."""
