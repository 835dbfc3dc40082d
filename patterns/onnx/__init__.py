"""ONNX graphs behind the matcher's GraphView: shapes followed, functions inlined, fused operators written out.

It gives the meaning of each ONNX operator in each opset; attention itself is the matcher's subject.
"""
