"""Coli: a line-protocol inference server for Mixture-of-Experts models that do not fit in memory."""

__version__ = "0.1.0"
