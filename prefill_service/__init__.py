"""The prefill service: computes prompts in chunks and pushes their KV layer by layer."""
