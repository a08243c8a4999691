"""Generate the stubs in `service/pb`; with `--check` say whether stubs and proto are in order.

`make proto` and `make lint` run it from the top of the checkout. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import filecmp
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

PROTO = "draftwire/v1/draftwire.proto"
STUBS = ("draftwire_pb2.py", "draftwire_pb2.pyi", "draftwire_pb2_grpc.py")
HERE = Path(__file__).parent
PB = HERE.parent / "service" / "pb"
SITE = sysconfig.get_path("purelib")  # googleapis-common-protos installs google/rpc/*.proto there


def generate(into: Path) -> None:
    """Write `into/service/pb/draftwire_pb2*`. The virtual path makes their imports right."""
    _protoc(
        f"-Iservice/pb={HERE / Path(PROTO).parent}",
        f"-I{SITE}",
        f"--python_out={into}",
        f"--pyi_out={into}",
        f"--grpc_python_out={into}",
        f"service/pb/{Path(PROTO).name}",
    )


def stale() -> list[str]:
    """The checked-in stubs that differ from what the proto gives now."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = Path(folder) / "service" / "pb"
        _, differing, missing = filecmp.cmpfiles(fresh, PB, STUBS, shallow=False)
    return differing + missing


def lint() -> bool:
    """Whether buf is content with the proto; it prints what it is not content with."""
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "image.binpb"
        _protoc(
            f"-I{HERE}",
            f"-I{SITE}",
            "--include_imports",
            "--include_source_info",
            f"--descriptor_set_out={image}",
            PROTO,
        )
        buf = Path(sysconfig.get_path("scripts")) / "buf"
        command = [str(buf), "lint", str(image), "--config", str(HERE / "buf.yaml")]
        return subprocess.run(command, check=False).returncode == 0


def check() -> int:
    outdated = stale()
    if outdated:
        print(f"stale: {', '.join(outdated)}; run `make proto`", file=sys.stderr)
    return 0 if lint() and not outdated else 1


def _protoc(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if wrong")
    if parser.parse_args().check:
        sys.exit(check())
    generate(HERE.parent)
