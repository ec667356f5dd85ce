"""Attention: paged KV, indexer, sparse attention and their strategies. Depends on torch only."""
