"""Runs a peer that is a Python library: `python worker.py LIBRARY`, JSON lines on stdin and stdout.

This file runs under the peer's own interpreter, so it imports the standard library, and the peer
when told to load it. Questions and answers, one object a line each:

    {"op": "load", "options": {...}}  ->  {"facts": {...}} or {"missing": "..."}
    {"op": "run", "job": {"prompts": [[id, ...], ...], "at_once": n, "max_tokens": n}}
                                      ->  {"seconds": s, "counts": [...]}

Whatever fails is answered with {"error": "..."}. What the library prints to stdout goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from queue import SimpleQueue
from typing import Any, Protocol, TextIO

Wave = list[list[int]]


class Library(Protocol):
    """A loaded engine."""

    facts: dict[str, str]

    def generate(self, wave: Wave, max_tokens: int) -> list[int]:
        """All prompts at once, greedy, EOS ignored; how many new tokens each got."""
        ...


class Vllm:
    """`vllm.LLM` in this process. Options: model, context, seqs, speculative (its own settings)."""

    def __init__(
        self, model: str, context: int, seqs: int, speculative: dict[str, Any] | None = None
    ) -> None:
        self._vllm = import_module("vllm")
        extra = {"speculative_config": speculative} if speculative else {}
        self._llm = self._vllm.LLM(
            model=model, dtype="bfloat16", max_model_len=context, max_num_seqs=seqs, **extra
        )
        self.facts = {"vllm": self._vllm.__version__, "speculative": str(speculative)}

    def generate(self, wave: Wave, max_tokens: int) -> list[int]:
        params = self._vllm.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in wave]
        results = self._llm.generate(prompts, params, use_tqdm=False)
        return [len(result.outputs[0].token_ids) for result in results]


class OpenVino:
    """OpenVINO GenAI's continuous batching. Options: model (a directory of its own format or a
    GGUF file), seqs, cache_gib, lookup (draft tokens of its prompt lookup; 0 is off)."""

    NGRAM = 3

    def __init__(self, model: str, seqs: int, cache_gib: int, lookup: int = 0) -> None:
        self._genai = import_module("openvino_genai")
        self._tensor = import_module("openvino").Tensor
        self._numpy = import_module("numpy")
        self._lookup = lookup
        scheduling = self._genai.SchedulerConfig()
        scheduling.max_num_seqs, scheduling.cache_size = seqs, cache_gib
        properties = {"prompt_lookup": True} if lookup else {}
        self._pipeline = self._genai.ContinuousBatchingPipeline(
            model, scheduling, "CPU", properties
        )
        self.facts = {"openvino-genai": self._genai.__version__, "lookup": str(lookup)}

    def generate(self, wave: Wave, max_tokens: int) -> list[int]:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        config.apply_chat_template = False
        if self._lookup:
            config.num_assistant_tokens, config.max_ngram_size = self._lookup, self.NGRAM
        inputs = [self._tensor(self._numpy.array([ids], dtype="int64")) for ids in wave]
        results = self._pipeline.generate(inputs, [config] * len(wave))
        return [len(result.m_generation_ids[0]) for result in results]


class Transformers:
    """`generate` of the stock model on a batch padded to its longest prompt. Options: model."""

    def __init__(self, model: str) -> None:
        self._torch = import_module("torch")
        transformers = import_module("transformers")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=self._torch.bfloat16
        )
        self._model = loaded.eval()
        self.facts = {"transformers": transformers.__version__, "torch": self._torch.__version__}

    def generate(self, wave: Wave, max_tokens: int) -> list[int]:
        width = max(map(len, wave))
        ids = self._torch.tensor([[0] * (width - len(row)) + row for row in wave])
        mask = self._torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in wave])
        with self._torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=max_tokens,
                max_new_tokens=max_tokens,
                pad_token_id=0,
            )
        return [out.shape[1] - width] * len(wave)


LIBRARIES: dict[str, Callable[..., Library]] = {
    "vllm": Vllm,
    "openvino": OpenVino,
    "transformers": Transformers,
}


def run(library: Library, job: dict[str, Any], clock: Callable[[], float]) -> dict[str, Any]:
    """One job, wave by wave."""
    prompts, at_once = job["prompts"], job["at_once"]
    counts: list[int] = []
    started = clock()
    for first in range(0, len(prompts), at_once):
        counts += library.generate(prompts[first : first + at_once], job["max_tokens"])
    return {"seconds": clock() - started, "counts": counts}


def answers(make: Callable[..., Library], questions: Iterator[str]) -> Iterator[dict[str, Any]]:
    """One answer per question."""
    library: Library | None = None
    for line in questions:
        question = json.loads(line)
        try:
            if question["op"] == "load":
                library = make(**question["options"])
                yield {"facts": library.facts}
            else:
                assert library is not None, "load comes first"
                yield run(library, question["job"], time.perf_counter)
        except Exception as error:  # told to whoever asked, who knows what to do about it
            absent = library is None and isinstance(error, ModuleNotFoundError)
            yield {"missing" if absent else "error": f"{type(error).__name__}: {error}"}


def lines(source: TextIO) -> Iterator[str]:
    """Lines as they come. At their end the process ends too, even in the middle of a job: whoever
    asked is gone."""
    queue: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in source:
            queue.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield queue.get()


def main() -> None:
    reply = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for answer in answers(LIBRARIES[sys.argv[1]], lines(sys.stdin)):
        reply.write(json.dumps(answer) + "\n")
        reply.flush()


if __name__ == "__main__":
    main()
