"""Lowering: a module compiled for a family of devices, and the artifact checked against the module.

The files here say what a target is and when an artifact agrees; `devices` holds the targets, `tvm`, `coreml` and
`runners` what they are made of. Nothing here knows how a model was found, converted or calibrated.
"""

if __name__ != "attnrewrite.targets":
    raise ImportError(
        "import attnrewrite.targets, not targets: a second copy of a package would be a second copy of its registries"
    )
