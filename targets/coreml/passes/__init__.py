"""What changes a MIL program on its way to a package: plain functions on a block of operators, one file each.

They are proven by where elements come from or left undone; they know no model. The order is in the pipeline.
"""
