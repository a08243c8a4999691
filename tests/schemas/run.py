"""Serves a request per schema and temperature, without drafts and with, and judges what comes."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from engine.build import assemble
from engine.config import EngineConfig
from engine.drafting import draft_choice
from engine.errors import InvalidRequest
from engine.grammar import Grammars
from engine.grammar_check import what_is_wrong
from engine.outcome import FinishReason, SourceStats
from engine.pooled import Models
from engine.request import GrammarParams, Request, SamplingParams, StopParams
from engine.training.evaluate import costless
from tests.schemas.corpus import Schema
from tests.schemas.judge import Closer, wrong

TEMPERATURES = (0.0, 0.8)


@dataclass
class Output:
    """What one request gave."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: str = ""
    error: str = ""


@dataclass
class Tally:
    """`ends` by reason; of those that ended by LENGTH so many were `completed`. `failures` say what
    is wrong with which output."""

    ends: Counter[str] = field(default_factory=Counter)
    completed: int = 0
    failures: list[str] = field(default_factory=list)


def choose(
    grammars: Grammars, schemas: Seq[Schema], wanted: int
) -> tuple[list[Schema], Counter[str]]:
    """The first `wanted` distinct schemas that are accepted; why others before them were not."""
    chosen: dict[str, Schema] = {}
    refused: Counter[str] = Counter()
    for schema in schemas:
        if len(chosen) == wanted:
            break
        bare = {k: v for k, v in json.loads(schema.text).items() if k != "$schema"}
        key = json.dumps(bare, sort_keys=True)
        if key in chosen:
            continue
        cause = what_is_wrong(grammars, "json_schema", schema.text)
        if cause:
            refused[cause] += 1
        else:
            chosen[key] = schema
    return list(chosen.values()), refused


def requests(
    tokenizer: Tokenizer, schemas: Seq[Schema], most: int, ends: Seq[int]
) -> list[Request]:
    """For each schema one request per temperature, one after another."""
    return [
        Request(
            str(i * len(TEMPERATURES) + j),
            tuple(tokenizer.encode(prompt(schema), add_special_tokens=False).ids),
            StopParams(most, eos_ids=frozenset(ends)),
            SamplingParams(temperature, seed=i),
            grammar=GrammarParams("json_schema", schema.text),
            arrived=float(i),
        )
        for i, schema in enumerate(schemas)
        for j, temperature in enumerate(TEMPERATURES)
    ]


def prompt(schema: Schema) -> str:
    """A chat as SmolLM2 has it."""
    question = f"Write a short example of this as JSON: {schema.about}"
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def serve(
    config: EngineConfig, models: Models, asked: Seq[Request]
) -> tuple[list[Output], dict[str, SourceStats]]:
    """Outputs in the order of `asked`, and the drafts by source, as if rows were free."""
    models = costless(models)
    draft = draft_choice(config, models, time.monotonic)
    engine = assemble(config, models, draft, time.monotonic).engine
    outputs = [Output() for _ in asked]
    drafts: dict[str, SourceStats] = {}
    waiting = list(asked)[::-1]
    live = 0
    while waiting or live:
        while waiting and live < config.max_seqs:
            engine.submit(waiting.pop())
            live += 1
        for chunk in engine.step():
            output = outputs[int(chunk.request_id)]
            output.ids += chunk.tokens
            output.text += chunk.text
            if chunk.finish is not None:
                live -= 1
                output.reason, output.error = chunk.finish.reason, chunk.finish.error
                for source, stats in chunk.finish.by_source:
                    drafts[source] = drafts.get(source, SourceStats()) + stats
    return outputs, drafts


def judge(grammars: Grammars, closer: Closer, schemas: Seq[Schema], outputs: Seq[Output]) -> Tally:
    """Of the outputs of `requests(schemas)`."""
    tally = Tally()
    for i, output in enumerate(outputs):
        schema = schemas[i // len(TEMPERATURES)]
        tally.ends[output.reason] += 1
        cause, text = _cause(grammars, closer, schema, output)
        tally.completed += output.reason == FinishReason.LENGTH and text is not None and not cause
        if cause:
            tally.failures.append(
                f"{schema.name}: {output.reason}: {cause}: {text or output.text!r}"
            )
    return tally


def _cause(
    grammars: Grammars, closer: Closer, schema: Schema, output: Output
) -> tuple[str, str | None]:
    """What is wrong, and the text that was judged, if there is one."""
    if output.reason == FinishReason.EOS:
        return wrong(schema.text, output.text), output.text
    if output.reason != FinishReason.LENGTH:
        return output.error or "an end that it cannot have", None
    try:
        start = grammars.matcher(GrammarParams("json_schema", schema.text))
        text = closer.close(start, output.ids)
    except (InvalidRequest, ValueError) as error:
        return str(error), None
    return ("" if text is None else wrong(schema.text, text)), text
