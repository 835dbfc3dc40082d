"""The passes over ONNX graphs: the rewrite, in the file's own opset and names, and what it is made of.

A rewritten site is its torch module exported and inlined. None knows where the file lies or what becomes of it.
"""
