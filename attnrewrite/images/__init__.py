"""Pictures: a data set's files and arrays, decoded, normalised as a model wants them, and handed out in batches.

It knows image formats and preprocessing. It does not know models, sites or calibration.
"""
