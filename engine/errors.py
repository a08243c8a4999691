"""What can go wrong in the engine.

EngineError
├── ConfigError        a setting, a model or a device that cannot work; start-up stops with it
│   └── ModelError     a model that is missing, broken or not supported
├── InvalidRequest     a request that can never be served
└── EngineDead         the engine cannot go on: unusable device or pool, or a lost child process
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors raised by this package."""


class ConfigError(EngineError):
    """A setting, a model or a device that cannot work."""


class ModelError(ConfigError):
    """A model that is missing, broken or not supported."""


class InvalidRequest(EngineError):
    """A request that can never be served."""


class EngineDead(EngineError):
    """The engine cannot go on."""
