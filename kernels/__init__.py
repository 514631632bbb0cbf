"""Torch operations of the model and the sampler: what CPUs run, and the twins that `kernels.gpu` is tested against."""
