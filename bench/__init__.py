"""Measurements of running services. They report figures; they judge nothing."""
