"""Core ML behind one door: conversion by coremltools, and an interpreter that checks a package without a Mac.

It knows MIL programs. It does not know attention forms or models.
"""
