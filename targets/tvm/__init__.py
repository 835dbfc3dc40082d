"""TVM behind one door: its names change with every release, and every one of them is spelled here.

It compiles exported programs and runs what it compiled. It does not know attention forms or models.
"""
