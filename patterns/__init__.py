"""Finding attention: any frontend's graph behind one view, and the matcher that reads it.

It recognises softmax(Q K^T) V however a graph computes it, and returns records: sites, and near misses with their
reasons. It does not know the forms that may stand there, and changes no graph.
"""

if __name__ != "attnrewrite.patterns":
    raise ImportError(
        "import attnrewrite.patterns, not patterns: a second copy of a package would be a second copy of its registries"
    )
