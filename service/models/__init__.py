"""The model supply: from what a user calls a model to a directory that the engine can load."""

from service.models.supply import resolve

__all__ = ["resolve"]
