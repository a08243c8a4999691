"""Kernels: tensors in, tensors out; nothing here knows of sequences or requests."""
