"""Finding attention: graphs of any frontend behind one view, and the matcher that reads them."""

if __name__ != "attnrewrite.patterns":
    raise ImportError(
        "import attnrewrite.patterns, not patterns: a second copy of a package would be a second copy of its registries"
    )
