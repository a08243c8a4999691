"""Settings of the engine: one frozen dataclass, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from engine.errors import ConfigError

WEIGHTS = ("auto", "native", "q4", "q8")
KV_DTYPES = ("auto", "bfloat16", "float32", "int8")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine runs. Sizes are in tokens (rows) unless the name says otherwise.

    `draft_rows`: drafts are spent only while a step has at most this many rows that are drawn from,
    and only where they pay (`engine.draft_choice`).
    `step_ms`: a step takes no longer where it has a choice, which is how long the first in line may
    have to wait; 0: as long as it takes.
    `weights`: auto, as `dtype` says; native, the blocks of the GGUF file that the model was made
    of, with the same bits; q4 or q8, quantised when it is loaded.
    `kv_dtype` is that of the model ("auto" or by name), or int8 with a scale per head and token.
    `threads` 0: one per core that this process may use. `max_context` 0: what the model allows.
    `verification`: coupled gives the same bytes with any drafts; rejection only the same law, and
    is there to be compared with.
    `numerics`: strict promises that a row has the same bits in any company, or refuses to start;
    auto is strict where that can be had; fast never promises. `cache_dir` keeps what was found out
    about a model on this machine; empty: nothing is kept.
    `model` and the models in `draft` are directories by the time the engine is built
    (`engine.specs.resolve_models`); `model_name` is what users call it.
    """

    model: str = "smollm2-135m"
    model_name: str = ""
    draft: str = "auto"
    max_draft_tokens: int = 8
    max_seqs: int = 64
    max_step_rows: int = 256
    draft_rows: int = 128
    step_ms: int = 100
    kv_cache_mib: int = 1024
    block_size: int = 16
    prefix_cache: bool = True
    dtype: str = "auto"
    weights: str = "auto"
    kv_dtype: str = "auto"
    device: str = "auto"
    threads: int = 0
    max_context: int = 0
    verification: str = "coupled"
    numerics: str = "auto"
    cache_dir: str = ""

    def __post_init__(self) -> None:
        checks = (
            (0 <= self.max_draft_tokens <= 64, "max_draft_tokens must be in 0..64"),
            (1 <= self.max_seqs <= 4096, "max_seqs must be in 1..4096"),
            (1 <= self.max_step_rows <= 65536, "max_step_rows must be in 1..65536"),
            (self.max_step_rows >= self.max_seqs, "max_step_rows must be at least max_seqs"),
            (self.draft_rows >= 0, "draft_rows must not be negative"),
            (self.step_ms >= 0, "step_ms must not be negative"),
            (self.kv_cache_mib >= 1, "kv_cache_mib must be positive"),
            (self.block_size == 16, "block_size must be 16"),
            (self.dtype in ("auto", "bfloat16", "float32"), f"unknown dtype {self.dtype!r}"),
            (self.numerics in ("auto", "strict", "fast"), f"unknown numerics {self.numerics!r}"),
            (
                self.verification in ("coupled", "rejection"),
                f"unknown verification {self.verification!r}",
            ),
            (
                self.verification == "coupled" or self.numerics != "strict",
                "numerics strict promises what verification rejection cannot keep",
            ),
            (self.weights in WEIGHTS, f"unknown weights {self.weights!r}"),
            (self.kv_dtype in KV_DTYPES, f"unknown kv_dtype {self.kv_dtype!r}"),
            (self.threads >= 0, "threads must not be negative"),
            (self.max_context >= 0, "max_context must not be negative"),
        )
        for ok, message in checks:
            if not ok:
                raise ConfigError(message)

    @property
    def step_s(self) -> float:
        """Seconds that a step may take."""
        return self.step_ms / 1000 or inf
