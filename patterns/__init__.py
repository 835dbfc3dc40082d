"""Finding attention: any frontend's graph behind one view, and the matcher that reads it.

It knows what softmax(Q K^T) V means in any spelling, and returns records: sites, near misses and their reasons. It does
not know the forms that may stand there, and changes no graph.
"""

if __name__ != "attnrewrite.patterns":
    raise ImportError(
        "import attnrewrite.patterns, not patterns: a second copy of a package would be a second copy of its registries"
    )
