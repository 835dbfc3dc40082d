"""Convolutions as they are written: as products of weights and windows, and channel by channel."""
