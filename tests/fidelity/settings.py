"""The settings that are compared: each a point on all axes at once, for a share of the requests."""

from __future__ import annotations

from dataclasses import dataclass

COLD, WARM = "cold", "warm"
LONGEST_DRAFT = 8


@dataclass(frozen=True, slots=True)
class Setting:
    """`share` requests, and what they are computed with and beside.

    `drafts`: none, ngram, model, suffix; table and head of a set of drafts, or both of them and
    suffix as made; or, from the reference's own tokens, perfect, wrong (never right)
    and flawed (right now and then); how many is drawn anew per sequence and step, 0 to 8.
    `batch`: fewest and most requests at once, drawn anew all the time. `rows`: `max_step_rows`,
    from which chunk sizes follow. `cache`: "" (off), or the prefix cache on, and warm if all was
    asked before. `tight`: a KV pool so small that sequences are preempted. `cancels`: with other
    requests that are cancelled in mid-course. `continued`: the prompt goes on with a part of the
    reference's output. `restart`: in a process of its own that is killed in mid-course. `samples`:
    so many of each prompt, which share its KV.
    """

    name: str
    share: int
    drafts: str = "none"
    batch: tuple[int, int] = (1, 32)
    rows: int = 256
    cache: str = ""
    tight: bool = False
    cancels: bool = False
    continued: bool = False
    restart: bool = False
    samples: int = 1

    @property
    def axes(self) -> tuple[str, ...]:
        """What a comparison under this setting counts for."""
        fewest, most = self.batch
        named = {
            f"drafts {self.drafts}": True,
            "k at random": self.drafts != "none",
            f"batch {fewest}..{most}": True,
            f"chunks <= {self.rows}": True,
            f"prefix cache {self.cache}": bool(self.cache),
            "preempted": self.tight,
            "cancelled neighbours": self.cancels,
            "continued": self.continued,
            "restart": self.restart,
            "n > 1": self.samples > 1,
        }
        return tuple(name for name, counts in named.items() if counts)


SETTINGS = (
    Setting("company", 80),
    Setting("ngram", 100, "ngram"),
    Setting("model", 50, "model", rows=512),
    Setting("wrong", 50, "wrong", (1, 16)),
    Setting("perfect", 70, "perfect", rows=512),
    Setting("alone", 60, "perfect", (1, 1)),
    Setting("full", 60, "flawed", (32, 32), rows=64),
    Setting("chunks-16", 60, "flawed", (1, 16), rows=16),
    Setting("chunks-48", 60, "wrong", rows=48),
    Setting("prefix-cold", 100, "ngram", rows=48, cache=COLD, cancels=True),
    Setting("prefix-warm", 50, "model", cache=WARM),
    Setting("preempted", 70, "flawed", (8, 16), tight=True),
    Setting("preempted-cached", 50, "flawed", (8, 16), cache=WARM, tight=True),
    Setting("cancels", 100, "ngram", cancels=True),
    Setting("continued", 100, "none", continued=True),
    Setting("restart", 100, "ngram", restart=True),
    Setting("samples", 100, "flawed", samples=4),
    Setting("samples-preempted", 60, "flawed", (8, 16), tight=True, samples=3),
)

# For a set of drafts that was made for the model.
OF_SET = (
    Setting("suffix", 200, "suffix", rows=512),
    Setting("table", 200, "table"),
    Setting("head", 200, "head", cache=WARM),
    Setting("made", 200, "made", rows=512),
    Setting("made-chunks", 100, "made", (1, 16), rows=48, cache=COLD, cancels=True),
    Setting("made-preempted", 80, "made", (8, 16), tight=True),
    Setting("made-samples", 60, "made", cache=WARM, samples=3),
)
