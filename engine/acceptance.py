"""How likely drafts are to be accepted: by source, grade and position, and by sequence.

A draft counts only if all before it are accepted, so what is estimated is the conditional
probability of each position; their products are the survival probabilities by which drafts are
picked (DSpark, Algorithm 1; `engine.draft_pick`).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from engine.types import Proposal, Verdict

GRADES = 10  # of sources that know how sure they are of a guess
SURE = tuple((grade + 0.5) / GRADES for grade in range(GRADES))
ANY = -1  # drafts of every grade
# What is expected of a source before it has been seen, by grade: with some hope, so that it is; and
# of drafts that it has still to draw.
PRIORS: Mapping[str, Seq[float]] = {
    "grammar": (0.99,),
    "ngram": (0.6, 0.7, 0.8, 0.9),
    "suffix": SURE,
    "table": SURE,
    "model": SURE,
    "head": SURE,
}
UNKNOWN = (0.6,)
UNDRAWN: Mapping[str, float] = {"model": 0.75, "head": 0.65}
POSITIONS = 8  # those beyond share the last one's estimate
TRUST = 8.0  # tries that the expectation is worth
MEMORY = 400.0  # tries after which old ones count half
# The same for what a sequence makes of a source: text differs more than sources do.
OWN_TRUST, OWN_MEMORY = 3.0, 30.0
CERTAIN = 0.98


def grade_of(probability: float) -> int:
    """The grade of a guess that its source takes to be right with this probability."""
    return min(GRADES - 1, max(0, int(GRADES * probability)))


class _Share:
    """A share of tries that succeed, the latest counting most."""

    __slots__ = ("hits", "tries")

    def __init__(self, hits: float, tries: float) -> None:
        self.hits, self.tries = hits, tries

    def add(self, hits: float, tries: float, memory: float) -> None:
        self.hits += hits
        self.tries += tries
        if self.tries > memory:
            self.hits, self.tries = self.hits / 2, self.tries / 2

    @property
    def value(self) -> float:
        return self.hits / self.tries


class Acceptance:
    """Estimates that learn from every verdict. Nothing of one request reaches the output of
    another: they decide how many drafts are verified, never what comes out."""

    def __init__(self) -> None:
        self._shares: dict[tuple[str, int, int], _Share] = {}
        self._own: dict[str, dict[str, _Share]] = {}

    def of_proposal(self, request_id: str, proposal: Proposal, least: float = 0.0) -> list[float]:
        """Of each of the drafts that are there: that it and all before are accepted. Ends before
        one that is less likely than `least`."""
        return self._survival(request_id, proposal.source, _grades(proposal), least)

    def of_draws(self, request_id: str, source: str, count: int, least: float = 0.0) -> list[float]:
        """The same of `count` drafts that a source would have to make first, of whatever grade."""
        return self._survival(request_id, source, (ANY,) * count, least)

    def _survival(
        self, request_id: str, source: str, grades: Seq[int], least: float
    ) -> list[float]:
        own = self._own.get(request_id, {}).get(source)
        skill = 1.0 if own is None else own.value
        left, out = 1.0, []
        for position, grade in enumerate(grades):
            left *= min(CERTAIN, skill * self._share(source, grade, position).value)
            if left < least:
                break
            out.append(left)
        return out

    def learn(self, request_id: str, proposal: Proposal, verdict: Verdict) -> None:
        """How one proposal, as it was verified, went."""
        drafted, accepted = len(proposal.tokens), verdict.accepted
        if not drafted:
            return
        expected = 0.0
        for position, grade in enumerate(_grades(proposal)[: accepted + 1]):
            share = self._share(proposal.source, grade, position)
            expected += share.value
            for known in (share, self._share(proposal.source, ANY, position)):
                known.add(float(position < accepted), 1.0, MEMORY)
        own = self._own.setdefault(request_id, {})
        if proposal.source not in own:
            own[proposal.source] = _Share(OWN_TRUST, OWN_TRUST)
        own[proposal.source].add(float(accepted), expected, OWN_MEMORY)

    def left_out(self, proposal: Proposal, first: int) -> None:
        """Its drafts were drawn, and those from the `first` on will not be verified. Draws would
        come to be expected to be as good as the verified ones; so it learns what these looked like.
        """
        reached = 1.0  # how likely it is that it would have come to a draft
        for position, grade in enumerate(_grades(proposal)):
            value = self._share(proposal.source, grade, position).value
            if position >= first:
                drawn = self._share(proposal.source, ANY, position)
                drawn.add(reached * value, reached, MEMORY)
            reached *= value

    def forget(self, request_id: str) -> None:
        self._own.pop(request_id, None)

    def _share(self, source: str, grade: int, position: int) -> _Share:
        key = source, grade, min(position, POSITIONS - 1)
        share = self._shares.get(key)
        if share is None:
            by_grade = PRIORS.get(source, UNKNOWN)
            prior = by_grade[min(grade, len(by_grade) - 1)]
            if grade == ANY:
                prior = UNDRAWN.get(source, UNKNOWN[0])
            share = self._shares[key] = _Share(prior * TRUST, TRUST)
        return share


def _grades(proposal: Proposal) -> Seq[int]:
    return proposal.grades[: len(proposal.tokens)] or (0,) * len(proposal.tokens)
