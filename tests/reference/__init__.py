"""Slow, obvious float64 oracles of the attention operators; they import nothing of the product."""
