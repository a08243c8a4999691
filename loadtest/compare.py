"""`python -m loadtest compare`: the same work for Draftwire and for whichever peers are here.

HumanEval prompts as token ids, greedy, EOS ignored, outputs of one length: N at once for every N
of --concurrency, and long prompts for one token. Rounds are interleaved, and all but the one who
works are stopped. Peers run as libraries in a process of their own or, as Draftwire does, as a
server with real clients on the same cores; they have interpreters of their own, since they pin
other versions of torch. A peer that is not here is left out, with a hint on how to get it.

A table of medians and a line of JSON at the end. Exit 0 unless somebody broke or miscounted.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from loadtest.contest import Entry, contest, ratios
from loadtest.peers.catalogue import OWN, PEERS, Places, contender
from loadtest.peers.group import unwind_on_sigterm
from loadtest.statistics import spread
from loadtest.tasks import Plan, Task, read_texts, tasks, warm_up
from loadtest.workload import humaneval

PLAIN, DRAFTS = f"{OWN} --draft none", f"{OWN} --draft ngram"


def compare(
    contenders: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="NAME",
            help=f"Who takes part, in this order: `{OWN} [FLAGS OF SERVE]`, {', '.join(PEERS)}. "
            "Default: Draftwire without and with n-gram drafts, and all peers.",
        ),
    ] = None,
    own: Annotated[bool, typer.Option("--own", help="Draftwire alone, no peers.")] = False,
    baseline: Annotated[
        str, typer.Option(help="Whose rates the ratios are over; the first fit one if empty.")
    ] = "",
    model: Annotated[str, typer.Option(help="A name of `draftwire models`, or a directory.")] = (
        "smollm2-135m"
    ),
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON lines with `prompt` or `turns`.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Prompts at once. Default: 1, 8, 32.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per prompt.")] = 128,
    prefill_tokens: Annotated[
        int, typer.Option(min=0, help="Length of the long prompts; 0 leaves them out.")
    ] = 1500,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts per round, at least.")] = 4,
    gguf: Annotated[
        Path | None, typer.Option(envvar="COMPARE_GGUF", help="The model for llama.cpp, OpenVINO.")
    ] = None,
    gguf_draft: Annotated[
        Path | None, typer.Option(envvar="COMPARE_GGUF_DRAFT", help="llama.cpp's draft model.")
    ] = None,
    vllm_python: Annotated[str, typer.Option(envvar="COMPARE_VLLM_PYTHON")] = "",
    openvino_python: Annotated[str, typer.Option(envvar="COMPARE_OPENVINO_PYTHON")] = "",
    transformers_python: Annotated[str, typer.Option(envvar="COMPARE_TRANSFORMERS_PYTHON")] = (
        sys.executable
    ),
    llama_server: Annotated[str, typer.Option(envvar="COMPARE_LLAMA_SERVER")] = "llama-server",
) -> None:
    """Compare Draftwire with peers, in interleaved rounds."""
    plan = Plan(tuple(concurrency or (1, 8, 32)), max_tokens, rounds, repeats, prefill_tokens)
    names = contenders or [PLAIN, DRAFTS, *(() if own else PEERS)]
    say = Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print
    unwind_on_sigterm()
    with tempfile.TemporaryDirectory() as logs:
        try:
            places = Places(
                model=model,
                directory=model_directory(model),
                logs=Path(logs),
                seqs=max(plan.at_once),
                gguf=gguf,
                gguf_draft=gguf_draft,
                vllm_python=vllm_python,
                openvino_python=openvino_python,
                transformers_python=transformers_python,
                llama_server=llama_server,
            )
            fighters = [contender(name, places) for name in names]
            texts = read_texts(prompts) if prompts else humaneval().texts
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        tokenizer = Tokenizer.from_file(str(places.directory / "tokenizer.json"))

        def encode(text: str) -> Sequence[int]:
            ids: list[int] = tokenizer.encode(text).ids
            return ids

        made = tasks(texts, encode, plan)
        entries = contest(fighters, made, warm_up(encode), say)
    report = summary(entries, made, baseline)
    Console().print(table(report))
    print(json.dumps({"model": model, "machine": machine(), "plan": asdict(plan)} | report))
    raise typer.Exit(1 if any(entry.failure for entry in entries) else 0)


def model_directory(model: str) -> Path:
    """Where our own server would load `model` from; fetched if need be. ValueError if it fails."""
    if (Path(model) / "tokenizer.json").is_file():
        return Path(model)
    pull = [sys.executable, "-m", "service", "models", "pull", model]
    done = subprocess.run(pull, stdout=subprocess.PIPE, text=True, check=False)
    _, found, directory = done.stdout.strip().rpartition(" is ready in ")
    if done.returncode or not found:
        raise ValueError(f"no model {model!r}")
    return Path(directory)


def machine() -> dict[str, Any]:
    """What a reader has to know of the machine."""
    return {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}


def summary(entries: Sequence[Entry], made: Sequence[Task], baseline: str) -> dict[str, Any]:
    """Everything measured, as it is printed. The baseline is named, or the first fit entry."""
    named = [e for e in entries if e.rates and e.name == baseline]
    base = next(iter(named or [e for e in entries if e.rates]), None)
    return {
        "baseline": base.name if base else None,
        "contenders": [
            {
                "name": entry.name,
                "facts": entry.facts,
                "missing": entry.missing,
                "failure": entry.failure,
                "tasks": {t.name: _line(entry, base, t) for t in made if t.name in entry.rates},
            }
            for entry in entries
        ],
    }


def _line(entry: Entry, base: Entry | None, task: Task) -> dict[str, Any]:
    ratio = ratios(entry, base, task.name) if base else None
    return {
        "unit": task.unit,
        "rates": entry.rates[task.name],
        "rate": asdict(spread(entry.rates[task.name])),
        "ratio": asdict(ratio) if ratio else None,
        "details": entry.details[task.name],
    }


def table(report: dict[str, Any]) -> Table:
    """A row per contender and task; rates as median (least - most), ratios likewise."""
    shown = Table("task", "contender", "rate", "", f"over {report['baseline']}", "tokens a step")
    done = [c for c in report["contenders"] if c["tasks"]]
    for task in dict.fromkeys(name for c in done for name in c["tasks"]):
        for one in done:
            if line := one["tasks"].get(task):
                steps = [d["tokens_per_step"] for d in line["details"] if "tokens_per_step" in d]
                shown.add_row(
                    *(task, one["name"], _numbers(line["rate"], ".1f"), line["unit"]),
                    _numbers(line["ratio"], ".2f") if line["ratio"] else "",
                    f"{spread(steps).median:.2f}" if steps else "",
                )
        shown.add_section()
    for one in report["contenders"]:
        if one["missing"] or one["failure"]:
            why = one["missing"] or f"failed: {one['failure'].splitlines()[0]}"
            shown.add_row("", one["name"], why)
    return shown


def _numbers(values: dict[str, float], form: str) -> str:
    median, least, most = (format(values[k], form) for k in ("median", "least", "most"))
    return f"{median} ({least} - {most})"
