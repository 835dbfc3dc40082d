"""The page of a model's graph: boxes by module, the sites and near misses in them, and why each is one.

It reads a GraphView and a Scan and knows nothing of how either was made.
"""
