"""Repairing accuracy without labels: stages that bring a rewritten model (the student) back to its teacher.

It knows rewritten sites, their forms and the original's activations on unlabelled images. It does not choose variants
and does not know where a model came from or where it will run.
"""
