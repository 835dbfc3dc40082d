"""Products of integers of eight bits, where activations are rounded row by row as they come."""
