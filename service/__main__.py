"""Entry point: `draftwire`, or `python -m service` from a checkout."""

from __future__ import annotations

from service.cli.app import build


def main() -> None:
    build()()


if __name__ == "__main__":  # the engine's child process imports this file again
    main()
