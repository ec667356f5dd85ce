"""Backends: the only places for device imports."""
