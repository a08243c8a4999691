"""Structured output by many schemas; `python -m tests.schemas`."""
