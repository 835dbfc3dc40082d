"""The passes over FX graphs: functionalisation, decompositions, constant folding, the rewrite, ReLU for GELU.

Each takes a graph of aten operations and gives a new one. None knows where a model came from or what becomes of it.
"""
