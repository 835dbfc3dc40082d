"""Convolutions of 3 x 3 by Winograd's algorithm: what takes it, the transforms, and the kernels around the products."""
