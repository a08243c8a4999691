"""The operations in C++, for CPU tensors: `library.load()`."""
