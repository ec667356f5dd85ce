"""Bytes between services: layouts, tickets, receipts and transfer engines. No torch, no grpc."""
