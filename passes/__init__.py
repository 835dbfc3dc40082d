"""Rewriting graphs: passes with a contract, which consume a Plan and swap each site for its attention form.

A pass takes a graph and gives a new one with what it edited; it checks what it requires and what it ensures. It does
not load models, calibrate them or write files.
"""

if __name__ != "attnrewrite.passes":
    raise ImportError(
        "import attnrewrite.passes, not passes: a second copy of a package would be a second copy of its registries"
    )
