"""Products with weights by Strassen's algorithm: what takes it, the algorithm as data, and the kernels of its steps."""
