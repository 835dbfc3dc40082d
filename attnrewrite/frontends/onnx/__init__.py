"""ONNX to FX: one torch call for each ONNX node, so that an ONNX model can be calibrated and lowered like any other.

`file.py` reads a file, and `scan.py` asks of it what needs no translation.
It knows the operators of ONNX and their opsets. It does not know attention: sites are found in the graph it makes.
"""
