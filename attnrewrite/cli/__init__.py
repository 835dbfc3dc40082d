"""The command line: options into records, verbs of `attnrewrite.api`, results as tables or one JSON object.

It is the top floor: nothing imports it, and it holds no knowledge that the Python API lacks.
"""
