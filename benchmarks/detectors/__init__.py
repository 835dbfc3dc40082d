"""The detectors that the detection benchmark compares, and the truth that they are held against."""
