"""Rewriting graphs: passes that consume a Plan and swap each site for its attention form."""

if __name__ != "attnrewrite.passes":
    raise ImportError(
        "import attnrewrite.passes, not passes: a second copy of a package would be a second copy of its registries"
    )
