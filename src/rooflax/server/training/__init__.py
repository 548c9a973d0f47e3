"""Tinker's API over HTTP: training runs that a client steps."""
