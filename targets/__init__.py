"""Lowering: one module per family of devices, each checking what it emits against the module."""

if __name__ != "attnrewrite.targets":
    raise ImportError(
        "import attnrewrite.targets, not targets: a second copy of a package would hold a second copy of its registries"
    )
