"""RPC plumbing that both services share."""
