"""A CUDA without a GPU, over which torch's real CUDA build runs: see ``runtime.cpp``."""
