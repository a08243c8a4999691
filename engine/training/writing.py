"""The first part: the target writes, after prompts that are made of the data."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from engine.build import assemble
from engine.config import EngineConfig
from engine.drafting import draft_choice
from engine.loader import LoadedModel
from engine.pooled import load_models
from engine.request import Request, SamplingParams, StopParams
from engine.training.corpus import Corpus
from engine.training.harvest import Listener, harvest
from engine.training.order import Order, Run
from engine.training.prompts import Prompt, read_prompts

WRITING = 0.4  # of the time
AT_ONCE, LONGEST_PROMPT, MOST_TOKENS = 32, 256, 160
KV_MIB = 1024


def write(run: Run, directory: Path) -> None:
    """Until there is enough, or it is time. Goes on where the last run ended. Raises ValueError if
    nothing comes of it, and Interrupted."""
    order = run.order
    config = EngineConfig(
        model=order.model,
        draft="ngram",
        prefix_cache=False,
        max_seqs=AT_ONCE,
        kv_cache_mib=KV_MIB,
        threads=order.threads,
    )
    begun = run.clock()
    models = load_models(config, run.clock, read=True)
    assert models.target.features is not None
    loaded = models.target.loaded
    corpus = Corpus(directory, loaded.config.hidden_size)
    choice = draft_choice(config, models, run.clock)
    listener = Listener(choice, models.target.features, config.block_size)
    built = assemble(config, models, choice, run.clock, listener=listener)
    wanted, loading, before = order.tokens or None, run.clock() - begun, corpus.rows

    def enough() -> bool:
        if run.stopped():
            return True
        return corpus.rows >= wanted if wanted else run.left(WRITING) <= 0

    begun = run.clock()
    with run.progress.phase("writing", wanted, corpus.rows, "tokens") as bar:
        source = requests(order, loaded, {d.number for d in corpus.documents})
        for _ in harvest(built.engine, listener, source, AT_ONCE, corpus, enough):
            run.account.tick()
            bar(corpus.rows)
        bar(corpus.rows)
    run.check()
    if not any(d.length > 1 and not d.held_out for d in corpus.documents):
        late = not wanted and run.left(WRITING) <= 0
        raise ValueError(
            f"{order.minutes:g} minutes are too few for the model to write anything"
            if late
            else "the data gave no prompt that the model wrote anything after"
        )
    a_token = (run.clock() - begun) / max(1, corpus.rows - before)
    run.account.save(written=True, load_s=loading, token_s=a_token)
    del models, built, listener, choice  # a KV cache, in cycles
    gc.collect()


def requests(order: Order, target: LoadedModel, done: AbstractSet[int]) -> Iterator[Request]:
    """Greedy ones and drawn ones in turn, named by the number of their prompt; but those that are
    `done`."""
    tokenizer: Any = AutoTokenizer.from_pretrained(target.directory, local_files_only=True)
    longest = max(1, min(LONGEST_PROMPT, target.context_limit - MOST_TOKENS))
    prompts = read_prompts([Path(p) for p in order.data], order.seed)
    for number, prompt in enumerate(prompts):
        if number in done:
            continue
        ids = _ids(prompt, target, tokenizer, longest)
        if not 0 < len(ids) <= longest or max(ids) >= target.vocab_size:
            continue
        yield Request(
            str(number),
            ids,
            StopParams(MOST_TOKENS, eos_ids=frozenset(target.eos_ids)),
            SamplingParams(float(number % 2), seed=order.seed + number),
        )


def _ids(prompt: Prompt, target: LoadedModel, tokenizer: Any, longest: int) -> tuple[int, ...]:
    """Of a recorded prompt no more than its end."""
    if prompt.ids:
        return prompt.ids[-longest:]
    if prompt.said and getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.said}], tokenize=False, add_generation_prompt=True
        )
        return tuple(target.tokenizer.encode(text, add_special_tokens=False).ids)
    text = prompt.text or prompt.said
    return tuple(target.tokenizer.encode(text).ids) if text else ()
