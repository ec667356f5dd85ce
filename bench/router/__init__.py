"""Measures what the router adds to the first token, and what our servicer costs per token."""
