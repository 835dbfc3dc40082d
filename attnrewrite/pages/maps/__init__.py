"""What attention looks at: maps of each site's tokens over a picture, for the original and for the forms.

It runs the model on one picture and draws; it knows capture and rewriting, and nothing of calibration.
"""
