"""Exact tree speculative decoding of a Hugging Face target without a server: ``python -m ddtree.standalone --help``."""
