"""ONNX graphs behind the matcher's GraphView: shapes followed, functions inlined, fused operators written out.

It says what each ONNX operator means in each opset. What attention is, is the matcher's to know.
"""
