"""The targets themselves: one class for each family of devices, made of the compilers and runners beside this folder.

`attnrewrite targets` lists them. They know modules and example inputs, and nothing of sites or calibration.
"""
