"""Errors of attention_core.

AttentionError                 an operator or strategy was asked for something it cannot do
└── AttentionConfigError       a shape, weight or length does not fit, named with its limit
"""

from __future__ import annotations


class AttentionError(Exception):
    """Base of every error that this package raises on purpose."""


class AttentionConfigError(AttentionError):
    """A value given to the package is impossible.

    Attributes:
        field: Name of the field, tensor or argument.
        value: What was given.
        limit: What would have been accepted, in words or as a value.
    """

    def __init__(self, field: str, value: object, limit: object) -> None:
        super().__init__(f"{field} is {value!r}, must be {limit}")
        self.field = field
        self.value = value
        self.limit = limit
