"""Pictures of results: HTML pages, charts and tables for the terminal, drawn from records.

It knows layout and colour. It does not measure or change anything.
"""
