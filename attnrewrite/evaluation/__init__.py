"""What a model is worth: accuracy, agreement with the original, multiply-adds and latency, as records.

It runs modules and artifacts and compares them. It does not change a model, and does not draw.
"""
