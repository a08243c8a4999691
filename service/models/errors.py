"""Why a model cannot be had.

ModelError (engine.errors)
├── UnknownModel        neither a name that is supplied, nor a path, nor a hub id
├── DownloadFailed      pip or the hub could not deliver
├── WrongChecksum       what was delivered is not what is pinned
├── DiskFull            not enough space below $DRAFTWIRE_HOME
└── ConversionFailed    the converter ended without a result
"""

from __future__ import annotations

from engine.errors import ModelError


class UnknownModel(ModelError):
    """Neither a name that is supplied, nor a path, nor a hub id."""


class DownloadFailed(ModelError):
    """pip or the hub could not deliver."""


class WrongChecksum(ModelError):
    """What was delivered is not what is pinned."""


class DiskFull(ModelError):
    """Not enough space below $DRAFTWIRE_HOME."""


class ConversionFailed(ModelError):
    """The converter ended without a result."""
