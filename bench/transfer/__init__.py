"""Measures how fast the engines move scattered blocks between two processes, and what it costs."""
