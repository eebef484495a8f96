"""The commands. The top layer: the only one that may import producer and consumer both.

What needs torch is imported inside the functions that use it, so that the base install can run ``doctor``.
"""
