"""How tokens are to be chosen: the `Sampling` of a request, checked."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from engine.request import LogitParams, SamplingParams
from engine.types import ModelInfo
from service.checks import Violations, check_ids
from service.pb import draftwire_pb2 as pb

# The noise of sampling cannot change an order of logits at a temperature below this: it is 0.
LEAST_TEMPERATURE = 1e-6
MAX_BIASES = 4096
MAX_BAD_WORDS = 256
MAX_BAD_WORD = 256
MOST_REPETITION, MOST_PENALTY, MOST_BIAS = 10.0, 2.0, 100.0


def parse_sampling(
    sampling: pb.Sampling, seed: int, info: ModelInfo, found: Violations
) -> SamplingParams:
    default = SamplingParams()
    temperature = sampling.temperature if sampling.HasField("temperature") else default.temperature
    top_k = sampling.top_k if sampling.HasField("top_k") else default.top_k
    top_p = sampling.top_p if sampling.HasField("top_p") else default.top_p
    min_p = sampling.min_p if sampling.HasField("min_p") else default.min_p
    found.need(
        math.isfinite(temperature) and temperature >= 0,
        "sampling.temperature",
        f"must be finite and >= 0, got {temperature}",
    )
    found.need(top_k >= 0, "sampling.top_k", f"must be >= 0, got {top_k}")
    # Written so that NaN fails.
    found.need(0 < top_p <= 1, "sampling.top_p", f"must be in (0, 1], got {top_p}")
    found.need(0 <= min_p <= 1, "sampling.min_p", f"must be in [0, 1], got {min_p}")
    return SamplingParams(
        temperature=temperature if temperature >= LEAST_TEMPERATURE else 0.0,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=sampling.seed if sampling.HasField("seed") else seed,
        logits=_logits(sampling, info, found),
    )


def _logits(sampling: pb.Sampling, info: ModelInfo, found: Violations) -> LogitParams:
    """Everything but bad words, which are yet to be tokenized."""
    default = LogitParams()
    repetition, typical = default.repetition_penalty, default.typical_p
    if sampling.HasField("repetition_penalty"):
        repetition = sampling.repetition_penalty
    if sampling.HasField("typical_p"):
        typical = sampling.typical_p
    # Written so that NaN fails.
    found.need(
        0 < repetition <= MOST_REPETITION,
        "sampling.repetition_penalty",
        f"must be in (0, {MOST_REPETITION:g}], got {repetition}",
    )
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(sampling, name)
        found.need(
            -MOST_PENALTY <= value <= MOST_PENALTY,
            f"sampling.{name}",
            f"must be in [-{MOST_PENALTY:g}, {MOST_PENALTY:g}], got {value}",
        )
    found.need(0 < typical <= 1, "sampling.typical_p", f"must be in (0, 1], got {typical}")
    allowed = None
    if sampling.HasField("allowed_token_ids"):
        allowed = _ids(
            sampling.allowed_token_ids.ids, "sampling.allowed_token_ids.ids", info, found
        )
        found.need(len(allowed) > 0, "sampling.allowed_token_ids.ids", "must not be empty")
    banned = _ids(sampling.banned_token_ids, "sampling.banned_token_ids", info, found)
    left = info.vocab_size - len(banned) if allowed is None else len(set(allowed) - set(banned))
    if allowed is None or allowed:
        found.need(left > 0, "sampling.banned_token_ids", "leave no token to choose")
    return LogitParams(
        repetition_penalty=repetition,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        bias=_bias(sampling, info, found),
        allowed=allowed,
        banned=banned,
        typical_p=typical,
    )


def _ids(ids: Seq[int], field: str, info: ModelInfo, found: Violations) -> tuple[int, ...]:
    """Each once, in order; no more than the vocabulary has."""
    if found.need(
        len(ids) <= info.vocab_size, field, f"{len(ids)} ids are more than the vocabulary has"
    ):
        check_ids(ids, field, info, found)
        return tuple(sorted(set(ids)))
    return ()


def _bias(
    sampling: pb.Sampling, info: ModelInfo, found: Violations
) -> tuple[tuple[int, float], ...]:
    field, bias = "sampling.logit_bias", sampling.logit_bias
    if not found.need(
        len(bias) <= MAX_BIASES, field, f"{len(bias)} entries are over the limit of {MAX_BIASES}"
    ):
        return ()
    for token, value in sorted(bias.items()):
        entry = f"{field}[{token}]"
        found.need(0 <= token < info.vocab_size, entry, "is not a token of the vocabulary")
        found.need(
            -MOST_BIAS <= value <= MOST_BIAS,
            entry,
            f"must be in [-{MOST_BIAS:g}, {MOST_BIAS:g}], got {value}",
        )
    return tuple(sorted(bias.items()))


def parse_bad_words(sampling: pb.Sampling, found: Violations) -> tuple[str, ...]:
    words = sampling.bad_words
    if not found.need(
        len(words) <= MAX_BAD_WORDS,
        "sampling.bad_words",
        f"{len(words)} words are over the limit of {MAX_BAD_WORDS}",
    ):
        return ()
    for index, word in enumerate(words):
        field = f"sampling.bad_words[{index}]"
        found.need(bool(word.strip()), field, "must not be empty")
        found.need(
            len(word) <= MAX_BAD_WORD,
            field,
            f"{len(word)} characters are over the limit of {MAX_BAD_WORD}",
        )
    return tuple(words)
