"""Softmax attention tile by tile: what takes it, and a kernel for either way that queries can lie in vectors."""
