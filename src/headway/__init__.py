"""Serves language models with a latency you can predict, account for and prove."""

__version__ = "0.1.0"
