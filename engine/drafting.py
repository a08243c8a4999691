"""Makes the draft sources that a setting names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.config import EngineConfig
from engine.draft import DraftSource
from engine.draft_choice import DraftChoice
from engine.draft_grammar import ForcedDraft, LegalDraft
from engine.draft_guard import GuardedDraft
from engine.draft_head import HeadDraft
from engine.draft_model import ModelDraft
from engine.draft_ngram import NgramDraft
from engine.draft_passes import Priced
from engine.draft_suffix import SuffixDraft
from engine.draft_table import TableDraft
from engine.draft_time import TimedDraft
from engine.draft_watch import WatchedDraft
from engine.errors import ConfigError
from engine.head_file import ABOUT, TABLE, read_about
from engine.loader import LoadedModel
from engine.ngram_table import open_table
from engine.pooled import Models
from engine.specs import DraftSpec, parse_drafts
from engine.step_costs import StepCosts
from engine.timed_model import TimedModel
from engine.types import Model

# Times what the target itself would take to catch up and then to draft token by token.
TOO_LONG = 2.0
# A chain of draws that is less likely than this to be right, by what drew it, is not gone on with.
LEAST = 0.3


def draft_choice(config: EngineConfig, models: Models, clock: Callable[[], float]) -> DraftChoice:
    """The choice between the sources that `config.draft` names and, if there are any, what grammars
    force. Each is watched, timed and guarded. Raises ConfigError for a table that is no use."""
    vocab_size, costs = models.target.loaded.vocab_size, models.target.costs

    def guarded(source: DraftSource) -> DraftSource:
        catch_up = costs.seconds(config.max_step_rows)
        passes = config.max_draft_tokens * costs.seconds(config.max_seqs)
        timed = TimedDraft(source, clock, TOO_LONG * (catch_up + passes))
        return GuardedDraft(LegalDraft(WatchedDraft(timed)), vocab_size)

    def drawing(
        kind: type[ModelDraft], model: Model, costs: StepCosts, context_limit: int
    ) -> Priced:
        rows = costs.rows_within(config.step_s, 0, 0, config.max_step_rows)
        least = LEAST if config.verification == "coupled" else 0.0
        source = kind(TimedModel(model, costs, clock), rows, context_limit, least)
        return Priced(guarded(source), costs)

    free: list[DraftSource] = []
    priced: list[Priced] = []
    for spec in parse_drafts(config.draft):
        if spec.kind == "head":
            head = models.heads[spec.directory]
            limit = models.target.loaded.context_limit
            priced.append(drawing(HeadDraft, head.paged, head.costs, limit))
        elif spec.kind == "model":
            draft = models.drafts[spec.model]
            limit = draft.loaded.context_limit
            priced.append(drawing(ModelDraft, draft.paged, draft.costs, limit))
        else:
            free.append(guarded(_free(spec, models.target.loaded)))
    if free or priced:
        free.insert(0, guarded(ForcedDraft()))
    return DraftChoice(free, priced, costs=costs, most_s=config.step_s)


def _free(spec: DraftSpec, target: LoadedModel) -> DraftSource:
    if spec.kind == "ngram":
        return NgramDraft()
    if spec.kind == "suffix":
        return SuffixDraft()
    directory = Path(spec.directory)
    try:
        if (directory / ABOUT).exists():  # a set of drafts, of which it is a part
            read_about(directory, target)
            directory /= TABLE
        table = open_table(directory)
    except (ValueError, OSError) as error:
        raise ConfigError(f"draft source {spec}: {error}") from error
    if table.vocab_size > target.vocab_size:
        raise ConfigError(
            f"draft source {spec}: the table's vocabulary of {table.vocab_size} is not that of the "
            f"model, which has {target.vocab_size}"
        )
    return TableDraft(table)
