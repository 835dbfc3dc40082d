"""Where models come from: a source is named, loaded and captured as a graph with inputs to run it on.

It knows files, checkpoints, the libraries that define models, torch.export and ONNX, and nothing of which attention
stands in a graph. Foreign code is run here and nowhere else, and only where the caller named it.
"""
