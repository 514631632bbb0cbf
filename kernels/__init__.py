"""Torch operations of the model and the sampler; each is the twin that a later GPU kernel is tested against."""
