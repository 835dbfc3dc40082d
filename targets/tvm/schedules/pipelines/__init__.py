"""Which rules are asked, in which order, and the pipelines for TVM that apply them: one for each kind of processor."""
