"""FX graphs of aten operations behind the GraphView that the matcher reads.

It gives the meaning of each aten operator and its arguments; attention itself is the matcher's subject.
"""
