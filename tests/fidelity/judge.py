"""What comes of comparing a request with its reference."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.outcome import FinishReason
from engine.request import Request
from tests.fidelity.bits import Digests
from tests.fidelity.company import Output, Tally
from tests.fidelity.prompts import rules_of
from tests.fidelity.settings import WARM, Setting


@dataclass(frozen=True, slots=True)
class Reference:
    """A request alone: its tokens, and a checksum of the logits behind each."""

    tokens: tuple[int, ...]
    digests: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """One request that is not as its reference. `at`: the first token or logits that differ."""

    request: str
    what: str
    at: int
    got: tuple[int | None, ...]
    want: tuple[int | None, ...]

    def line(self) -> str:
        return f"{self.request}: {self.what} {self.at}: {list(self.got)}, not {list(self.want)}"


@dataclass(slots=True)
class Row:
    """The outcome of one setting. `idle` says what should have happened and did not."""

    setting: str
    axes: tuple[str, ...]
    comparisons: int = 0
    greedy: int = 0
    ruled: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    cached: int = 0
    cancelled: int = 0
    seconds: float = 0.0
    tally: Tally = field(default_factory=Tally)
    differences: list[Difference] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)

    def count_rules(self, request: Request) -> None:
        for rule in rules_of(request):
            self.ruled[rule] = self.ruled.get(rule, 0) + 1


def digests_of(request: Request, count: int, digests: Digests) -> tuple[int | None, ...]:
    """What was noted for each of the `count` tokens that follow the prompt."""
    first = len(request.prompt)
    seed = request.sampling.seed
    return tuple(digests.get((seed, p)) for p in range(first, first + count))


def judge(row: Row, request: Request, got: Output, want: Reference, digests: Digests) -> None:
    """One comparison: complete token ids, then the bits behind them."""
    assert got.finish is not None
    row.comparisons += 1
    row.greedy += request.sampling.temperature == 0
    row.count_rules(request)
    row.tokens += len(got.tokens)
    row.cached += got.finish.cached_tokens
    if got.finish.reason is FinishReason.ERROR:
        row.differences.append(Difference(f"{request.id} ({got.finish.error})", "error", 0, (), ()))
        return
    seen = digests_of(request, len(got.tokens), digests)
    for what, a, b in (
        ("token", tuple(got.tokens), want.tokens),
        ("logits of token", seen, want.digests),
    ):
        if a != b:
            row.differences.append(difference(request.id, what, a, b))


def judge_cancelled(row: Row, request: Request, got: Output, want: Reference) -> None:
    """What a cancelled request got must be the beginning of its reference."""
    row.cancelled += got.finish is not None and got.finish.reason is FinishReason.CANCELLED
    begun = want.tokens[: len(got.tokens)]
    if tuple(got.tokens) != begun:
        row.differences.append(difference(request.id, "token", tuple(got.tokens), begun))


def difference(
    request_id: str, what: str, got: tuple[int | None, ...], want: tuple[int | None, ...]
) -> Difference:
    pairs = zip(got, want, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(want)))
    return Difference(request_id, what, at, got[at : at + 5], want[at : at + 5])


def idle(setting: Setting, row: Row) -> list[str]:
    """What a setting is for and did not do. A comparison with nothing happening shows nothing."""
    did = row.tally
    needed = {
        "no drafts were made": setting.drafts == "none" or did.drafted > 0,
        "no draft was rejected": setting.drafts in ("none", "perfect", "model", "ngram")
        or did.accepted < did.drafted,
        "a perfect draft was rejected": setting.drafts != "perfect" or did.accepted == did.drafted,
        "a wrong draft was accepted": setting.drafts != "wrong" or did.accepted == 0,
        "nobody had company": setting.batch[1] == 1 or did.most_at_once > 1,
        "nobody was preempted": not setting.tight or did.preempted > 0,
        "nothing was found in the prefix cache": setting.cache != WARM or row.cached > 0,
        "no sample began with the KV of another": setting.samples == 1 or row.cached > 0,
        "nobody was cancelled": not setting.cancels or row.cancelled > 0,
    }
    return [what for what, happened in needed.items() if not happened]
