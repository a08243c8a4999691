"""What the code promises about itself: who imports whom, and that nothing generated is stale."""

from __future__ import annotations

import ast
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import kernels

ROOT = Path(__file__).parent.parent
PACKAGES = ("service", "engine", "kernels", "loadtest")
GENERATED = ROOT / "service" / "pb"
MODULES = sorted(
    path for name in PACKAGES for path in (ROOT / name).rglob("*.py") if path.parent != GENERATED
)
CEILING = 350  # lines; longer than that is two ideas


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_contracts() -> None:
    lint = Path(sysconfig.get_path("scripts")) / "lint-imports"
    done = subprocess.run(
        [lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_stubs_and_proto_are_in_order() -> None:
    done = subprocess.run(
        [sys.executable, "protos/stubs.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_kernels_is_ours_and_transformers_leaves_it_alone() -> None:
    """transformers looks for a package of another project by the same name."""
    assert kernels.__file__ == str(ROOT / "kernels" / "__init__.py")
    assert not hasattr(kernels, "__version__")
    out = python(
        "import torch\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "from transformers.utils import is_kernels_available\n"
        "config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8,"
        " num_hidden_layers=1, num_attention_heads=2)\n"
        "logits = LlamaForCausalLM(config)(torch.tensor([[1, 2, 3]])).logits\n"
        "print(is_kernels_available(), tuple(logits.shape))\n"
    )
    assert out == "False (1, 3, 16)\n"


@pytest.mark.parametrize(
    "module", ["service.__main__", "service.app", "service.cli.quickstart", "loadtest.__main__"]
)
def test_no_torch_outside_the_engine(module: str) -> None:
    heavy = python(
        f"import sys, {module}\n"
        "print(*({'torch', 'transformers', 'triton', 'gguf', 'llguidance'} & set(sys.modules)))\n"
    )
    assert heavy.split() == []


@pytest.mark.parametrize(
    "command", [["--help"], ["generate", "--help"], ["serve", "--help"], ["train-draft", "--help"]]
)
def test_the_command_line_is_light(command: list[str]) -> None:
    loaded = python(
        "import sys\n"
        f"sys.argv = ['draftwire', *{command}]\n"
        "from service.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('LOADED', *sys.modules)\n"
    )
    names = set(loaded.rpartition("LOADED")[2].split())
    assert "service.cli.generate" in names
    assert not names & {"torch", "transformers", "opentelemetry.sdk", "service.app"}


def test_modules_say_what_they_are_and_stay_small() -> None:
    silent, long = [], []
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        if text.strip() and not ast.get_docstring(ast.parse(text)):
            silent.append(path)
        if len(text.splitlines()) > CEILING:
            long.append(path)
    assert (silent, long) == ([], [])
