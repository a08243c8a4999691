"""Is every request the same whatever else the engine does? `python -m tests.fidelity`."""
