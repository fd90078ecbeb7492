"""Triton kernels of the engine. Each has a plain-torch twin that defines it (`ddtree.attention`, `ddtree.gdn`,
`ddtree.tree`, `ddtree.walk`), the same arguments, fixed shapes, no host sync: all can be captured in a CUDA graph.

They compile for compute capability 8.0 and newer. With TRITON_INTERPRET=1 they run on CPU tensors (slow: for tests).
"""
