"""What runs an artifact on this machine: onnxruntime, OpenCL, an emulated ARM core, other programs.

A runner gives outputs or says in one sentence why it cannot. It does not compile and does not judge.
"""
