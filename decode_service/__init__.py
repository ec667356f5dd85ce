"""The decode service: owns requests, reserves blocks, calls prefill, decodes and streams tokens."""
