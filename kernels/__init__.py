"""Kernels: tensors in, tensors out; nothing here knows of sequences or requests.

`ops.load_ops` picks an implementation of three operations over a paged KV pool: `write_kv`,
`paged_attention` and `sample_rows`. `reference` says what they mean, in torch; `cpu` is the same in
C++; `triton` is attention for a GPU. Importing this package does nothing and needs no torch.

The pool of one layer is two tensors in blocks of `BLOCK` positions:

    K  (num_blocks, kv_heads, head_dim // 2, BLOCK, 2)   pairs of dims, interleaved per position
    V  (num_blocks, kv_heads, BLOCK // 2, head_dim, 2)   pairs of positions, interleaved per dim

This is the order in which dot-product instructions over pairs of bf16, and matrix tiles, read them:
one vector holds two neighbours of the sum for sixteen lanes of the result. A slot is
`block * BLOCK + offset`; slot -1 is padding. With int8 elements there are two more, the float32
scales of K and V, (num_blocks, kv_heads, BLOCK).
"""
