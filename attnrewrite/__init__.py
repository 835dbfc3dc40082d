"""attnrewrite: find, replace, repair and lower the attention of trained vision transformers, at graph level."""

__version__ = "0.1.0"
