"""What both services need beside attention: models, requests, blocks, sampling, RPC plumbing."""
