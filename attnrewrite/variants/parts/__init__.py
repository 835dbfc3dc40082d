"""What attention forms are made of: the protocol, products, masks of keys, exact rows, closed-form fits.

Each file is one idea of linear attention, written once. It does not know which variant uses it.
"""
