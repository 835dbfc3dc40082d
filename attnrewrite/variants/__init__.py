"""The attention forms: one file per family, one protocol, and the registry that names them."""
