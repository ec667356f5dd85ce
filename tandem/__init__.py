"""Tandem: prefill and decode on separate machines. The public Python surface."""
