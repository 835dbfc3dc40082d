"""The attention forms: one torch module and one frozen dataclass of options each, and the sites that each honours.

A form sees the heads' queries, keys and values and knows nothing of graphs, frontends, projections or targets. What
several forms are made of lies in `parts`.
"""
