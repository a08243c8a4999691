"""Kernels for a GPU. Needs the extra `gpu`; nothing here is imported unless asked for."""
