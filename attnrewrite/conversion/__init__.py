"""A conversion from end to end: scan, prove the extraction, rewrite, calibrate, check, and write the folder.

It composes the rooms below and holds the record of what became of each site. How a form, a pass or a stage works is
theirs to know.
"""
