"""Trains a draft head on what its target has written.

Every position is asked what the target would say next, given its hidden state before: first from
the target's own states, then from the head's, once and twice over, as in a chain of drafts
(training-time test: EAGLE-3, Li et al. 2025, section 3.2, without its attention mask).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from engine.head import HeadModule
from engine.training.corpus import Corpus, Document

BETAS, CLIP = (0.9, 0.95), 1.0
WARM_UP = 40  # steps until the learning rate is at its highest
PROMPT_WEIGHT = 0.3  # of rows that the target did not write
STATE_WEIGHT = 0.2  # of guessing the hidden state, beside guessing the token


@dataclass(frozen=True, slots=True)
class Schedule:
    """`steps` of `windows` windows of `length` rows; chains of up to `depth` guesses, the next one
    from so much of the training on as `deeper` says."""

    steps: int
    windows: int = 4
    length: int = 192
    depth: int = 3
    deeper: tuple[float, ...] = (0.0, 0.15, 0.5)
    rate: float = 3e-3

    def rate_at(self, step: int) -> float:
        """Cosine, after a warm-up."""
        warm = min(1.0, (step + 1) / WARM_UP)
        return self.rate * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / self.steps)))

    def depth_at(self, step: int) -> int:
        return sum(step >= share * self.steps for share in self.deeper[: self.depth])


@dataclass(frozen=True, slots=True)
class Batch:
    """(B, T) each: `tokens`, and `features` (B, T, hidden) of their positions; `weight` of what is
    said after them, 0 past the end of a document."""

    tokens: Tensor
    features: Tensor
    weight: Tensor


class Windows:
    """Draws windows of documents, each document as often as it is long. The same seed and step give
    the same batch."""

    def __init__(self, corpus: Corpus, held_out: bool, seed: int) -> None:
        self._documents = [d for d in corpus.documents if d.held_out == held_out and d.length > 1]
        self._tokens, self._features = corpus.tokens(), corpus.features()
        lengths = np.array([d.length for d in self._documents], np.float64)
        self._chance = lengths / lengths.sum()
        self._seed = seed

    def batch(self, step: int, windows: int, length: int) -> Batch:
        rng = np.random.default_rng((self._seed, step))
        chosen = rng.choice(len(self._documents), windows, p=self._chance)
        hidden = self._features.shape[1]
        tokens = torch.zeros(windows, length, dtype=torch.long)
        features = torch.zeros(windows, length, hidden)
        weight = torch.zeros(windows, length)
        for row, document in enumerate(self._documents[i] for i in chosen):
            first = int(rng.integers(0, max(1, document.length - length + 1)))
            count = min(length, document.length - first)
            rows = slice(document.start + first, document.start + first + count)
            tokens[row, :count] = torch.from_numpy(self._tokens[rows].astype(np.int64))
            bits = torch.from_numpy(np.array(self._features[rows]))
            features[row, :count] = bits.view(torch.bfloat16).float()
            weight[row, :count] = _weight(document, first, count)
        return Batch(tokens, features, weight)


def _weight(document: Document, first: int, count: int) -> Tensor:
    written = torch.arange(first, first + count) >= document.prompt - 1
    return torch.where(written, 1.0, PROMPT_WEIGHT)


class Trainer:
    """`module` in float32, its `lm_head` frozen; `embedding` (V, hidden) and `norm`, a module, are
    the target's."""

    def __init__(
        self, module: HeadModule, embedding: Tensor, norm: torch.nn.Module, schedule: Schedule
    ) -> None:
        module.lm.lm_head.requires_grad_(False)
        module.lm.model.embed_tokens = None
        self.module = module
        self.schedule = schedule
        self._embedding = embedding
        self._norm = norm
        self.reset()

    def reset(self) -> None:
        """Forget what the optimizer has seen."""
        own = [p for p in self.module.parameters() if p.requires_grad]
        rate = self.schedule.rate
        self.optimizer = torch.optim.AdamW(own, lr=rate, betas=BETAS, weight_decay=0.01)

    def save(self, path: Path, done: int) -> None:
        """All that it takes to go on after `done` steps, at once or not at all."""
        partial = path.with_suffix(".partial")
        torch.save(
            {
                "module": self.module.own_state(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": asdict(self.schedule),
                "done": done,
            },
            partial,
        )
        partial.replace(path)

    def load(self, path: Path) -> int:
        """What `save` wrote; how many steps were done."""
        state = torch.load(path, weights_only=True)
        self.module.load_state_dict(state["module"], strict=False)
        self.schedule = Schedule(**state["schedule"])
        self.reset()
        self.optimizer.load_state_dict(state["optimizer"])
        done: int = state["done"]
        return done

    def step(self, number: int, batch: Batch) -> float:
        """One step of training; the loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.rate_at(number)
        loss = torch.zeros(())
        depth = self.schedule.depth_at(number)
        total = batch.weight.sum()
        with torch.no_grad():
            truth = self._truth(batch)
        for guess in self._chain(batch, depth):
            loss = loss + (self._loss(guess, truth, batch) * batch.weight).sum() / total / depth
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), CLIP)
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def accuracy(self, batches: Iterable[Batch]) -> list[float]:
        """By depth of the chain, the share of rows written by the target after which the head would
        say what the target's most likely token is."""
        right, rows = [0] * self.schedule.depth, 0
        for batch in batches:
            truth = self._truth(batch).argmax(-1)
            written = batch.weight == 1.0
            rows += int(written.sum())
            for depth, guess in enumerate(self._chain(batch, self.schedule.depth)):
                said = self.module.lm.lm_head(self.module.lm.model.norm(guess)).argmax(-1)
                right[depth] += int((said == truth)[written].sum())
        return [count / max(1, rows) for count in right]

    def _chain(self, batch: Batch, depth: int) -> Iterator[Tensor]:
        """The head's hidden states (B, T, hidden), from the target's, from its own, and so on."""
        embeddings = self._embedding[batch.tokens].float()
        features = torch.nn.functional.pad(batch.features[:, :-1], (0, 0, 1, 0))
        inner = self.module.lm.model
        for _ in range(depth):
            x = self.module.fc(self.module.normed(features, embeddings))
            positions = torch.arange(x.shape[1])[None]
            guess = inner.layers[0](x, position_embeddings=inner.rotary_emb(x, positions))
            yield guess
            features = torch.cat((features[:, :1], guess[:, :-1]), 1)

    def _truth(self, batch: Batch) -> Tensor:
        """The target's logits (B, T, V') for the ids that the head knows."""
        logits: Tensor = self.module.lm.lm_head(self._norm(batch.features))
        return logits

    def _loss(self, guess: Tensor, truth: Tensor, batch: Batch) -> Tensor:
        """(B, T): half against the target's distribution, half against its most likely token; and
        how far the state is off, where a typical component is 1."""
        logs = self.module.lm.lm_head(self.module.lm.model.norm(guess)).log_softmax(-1)
        best = truth.argmax(-1, keepdim=True)
        token = -0.5 * (truth.softmax(-1) * logs).sum(-1) - 0.5 * logs.gather(-1, best)[..., 0]
        scale = batch.features.square().mean(-1, keepdim=True).sqrt() + 1e-6
        state = smooth_l1_loss(guess / scale, batch.features / scale, reduction="none").mean(-1)
        loss: Tensor = token + STATE_WEIGHT * state
        return loss
