"""`draftwire generate`: one generation, streamed to the terminal as it comes."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import grpc
import typer

from service.cli import session
from service.cli.channel import connect
from service.cli.errors import describe, enum_name, from_rpc_error
from service.cli.health import wait_serving
from service.cli.request import build_params, parse_bias, text_or_file
from service.pb import draftwire_pb2 as pb
from service.recorded import plain

INTERRUPTED = 130
COMPLETE = {"STOP", "EOS", "LENGTH", "CONTEXT", "DEADLINE", "TIME_BUDGET"}


class PriorityName(StrEnum):
    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


def generate(
    prompt: Annotated[str, typer.Argument(help="What to continue; `-` reads it from stdin.")],
    target: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the server listens.")
    ] = "127.0.0.1:50051",
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep this much probability.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Drop tokens less likely than this times the best.")
    ] = None,
    typical_p: Annotated[
        float | None, typer.Option(help="Keep this much of what surprises as expected.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: tokens seen before are less likely.")
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Above 0: tokens of the output are less likely.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="The same, for each time that they are in it.")
    ] = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID:V", help="Add V to the logit of a token (repeatable)."),
    ] = None,
    bad_word: Annotated[
        list[str] | None, typer.Option(metavar="STR", help="Never generate this (repeatable).")
    ] = None,
    forced_text: Annotated[
        str | None, typer.Option(metavar="STR", help="The output begins with this.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same request, same seed, same output.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="STR", help="End before this text (repeatable).")
    ] = None,
    include_stop: Annotated[
        bool, typer.Option("--include-stop", help="Print the stop string, too.")
    ] = False,
    min_tokens: Annotated[
        int | None, typer.Option(help="Do not end the output before so many tokens.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the model's end of sequence.")
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --json: logprobs, and those of the N likeliest."),
    ] = None,
    prompt_logprobs: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --json: the same of the prompt's tokens."),
    ] = None,
    text_offsets: Annotated[
        bool, typer.Option("--text-offsets", help="With --json: where each token's text begins.")
    ] = False,
    echo: Annotated[
        bool, typer.Option("--echo", help="Print the prompt, too, before the output.")
    ] = False,
    json_schema: Annotated[
        str | None,
        typer.Option(metavar="FILE|TEXT", help="The output is JSON that this schema accepts."),
    ] = None,
    regex: Annotated[
        str | None, typer.Option(metavar="RE", help="The output matches it from end to end.")
    ] = None,
    choice: Annotated[
        list[str] | None,
        typer.Option(metavar="STR", help="The output is one of these (repeatable)."),
    ] = None,
    grammar: Annotated[
        str | None,
        typer.Option(metavar="FILE|TEXT", help="The output is one of this Lark grammar's."),
    ] = None,
    n: Annotated[
        int | None, typer.Option("-n", metavar="N", help="So many samples of one prompt.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's chat message.")
    ] = False,
    priority: Annotated[PriorityName | None, typer.Option(help="Scheduling class.")] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="S", help="End the generation after S seconds.")
    ] = None,
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="No drafts for this generation.")
    ] = False,
    max_draft_tokens: Annotated[
        int | None, typer.Option(help="Most draft tokens per step.")
    ] = None,
    draft_source: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Use this draft source only (repeatable)."),
    ] = None,
    wait: Annotated[
        float, typer.Option(metavar="S", help="First wait up to S seconds until it is serving.")
    ] = 0.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end instead of the text.")
    ] = False,
) -> None:
    """Continue PROMPT and stream the text to stdout.

    Only options that are given are sent; the server's defaults stand for the others. Exit status:
    0 done, 1 error, 2 wrong usage, 130 interrupted.
    """
    if not as_json and (unseen := _unseen(logprobs, prompt_logprobs, text_offsets)):
        raise typer.BadParameter(f"{unseen} is only seen with --json")
    try:
        params = build_params(
            prompt=_stdin() if prompt == "-" else prompt,
            chat=chat,
            n=n,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=parse_bias(logit_bias or ()),
            bad_words=bad_word or (),
            forced_text=forced_text,
            seed=seed,
            stop=stop or (),
            include_stop=include_stop,
            ignore_eos=ignore_eos,
            min_tokens=min_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            echo=echo,
            text_offsets=text_offsets,
            priority=priority,
            timeout=timeout,
            no_speculation=no_speculation,
            max_draft_tokens=max_draft_tokens,
            draft_sources=draft_source or (),
            json_schema=text_or_file(json_schema),
            regex=regex,
            choices=choice or (),
            grammar=text_or_file(grammar),
        )
    except (ValueError, OverflowError) as error:  # does not fit its field, or is not Unicode
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(asyncio.run(_generate(target, params, wait, as_json)))


def _unseen(logprobs: int | None, prompt_logprobs: int | None, text_offsets: bool) -> str:
    """The first option that only --json shows."""
    given = {
        "--logprobs": logprobs is not None,
        "--prompt-logprobs": prompt_logprobs is not None,
        "--text-offsets": text_offsets,
    }
    return next((name for name, there in given.items() if there), "")


async def _generate(target: str, params: pb.GenerationParams, wait: float, as_json: bool) -> int:
    interrupt = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt.set)
    on_text: Callable[[str], None] = (lambda _: None) if as_json else _write
    async with connect(target) as channel:
        if wait > 0 and not await _served(channel, wait, interrupt):
            return INTERRUPTED if interrupt.is_set() else _fail(f"{target} is not serving")
        try:
            results = await session.run(channel, params, on_text, interrupt)
        except session.Rejected as rejected:
            return _fail(describe(rejected.status))
        except grpc.aio.AioRpcError as error:
            return _fail(describe(from_rpc_error(error)))
    return _conclude(results, interrupt.is_set(), as_json)


async def _served(channel: grpc.aio.Channel, wait: float, interrupt: asyncio.Event) -> bool:
    """Wait for the server, or for the interrupt, whichever comes first."""
    serving = asyncio.ensure_future(wait_serving(channel, wait))
    interrupted = asyncio.ensure_future(interrupt.wait())
    await asyncio.wait({serving, interrupted}, return_when=asyncio.FIRST_COMPLETED)
    interrupted.cancel()
    if interrupt.is_set():
        serving.cancel()
        return False
    return await serving


def _conclude(results: list[session.Result], interrupted: bool, as_json: bool) -> int:
    """Say how it ended; the exit status."""
    summaries = [summarise(result) for result in results]
    if as_json and results[0].accepted is not None:
        whole = summaries[0] if len(results) == 1 else {"samples": summaries}
        _write(json.dumps(whole) + "\n")
    elif not as_json:
        for index, result in enumerate(results[1:], 1):  # the first was printed as it came
            _write(f"\n--- sample {index}\n{result.text}")
        if sys.stderr.isatty():
            _say(summaries[0])
    if interrupted:
        return INTERRUPTED
    return max(_status(*pair) for pair in zip(results, summaries, strict=True))


def _status(result: session.Result, summary: dict[str, Any]) -> int:
    if result.finished is None:
        return _fail("the stream ended before the generation did")
    if result.finished.HasField("error"):
        return _fail(describe(result.finished.error))
    if summary["finish_reason"] not in COMPLETE:
        return _fail(f"the server ended the generation early: {summary['finish_reason']}")
    return 0


def summarise(result: session.Result) -> dict[str, Any]:
    """The object that `--json` prints. A generation that was cut off counts what came."""
    accepted = result.accepted or pb.Accepted()
    finished = result.finished or pb.Finished(
        reason=pb.FINISH_REASON_CANCELLED,
        usage=pb.Usage(
            prompt_tokens=accepted.prompt_tokens, completion_tokens=len(result.token_ids)
        ),
    )
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        **_asked_for(result),
        "finish_reason": enum_name(pb.FinishReason, finished.reason).removeprefix("FINISH_REASON_"),
        **_matched(finished),
        "seed": (accepted.seed + result.index) % 2**64,
        "usage": plain(finished.usage),
        "speculation": plain(finished.speculation),
        "timings": {
            "queue_s": finished.timings.queue_s,
            "ttft_s": finished.timings.ttft_s if finished.timings.HasField("ttft_s") else None,
            "total_s": finished.timings.total_s,
        },
    }


def _matched(finished: pb.Finished) -> dict[str, Any]:
    """What ended it, if that was a stop string or token."""
    which = finished.WhichOneof("matched")
    return {} if which is None else {which: getattr(finished, which)}


def _asked_for(result: session.Result) -> dict[str, Any]:
    """What comes only if it was asked for."""
    found: dict[str, Any] = {}
    if result.prompt_token_ids:
        found["prompt_text"] = result.prompt_text
    for name in ("prompt_token_ids", "prompt_logprobs", "logprobs", "text_offsets"):
        if values := getattr(result, name):
            found[name] = [plain(v) if isinstance(v, pb.TokenLogprobs) else v for v in values]
    return found


def _stdin() -> str:
    return sys.stdin.buffer.read().decode()


def _write(text: str) -> None:
    """To stdout, byte for byte, now."""
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def _say(summary: dict[str, Any]) -> None:
    from rich.console import Console

    usage, drafts, timings = summary["usage"], summary["speculation"], summary["timings"]
    tokens = usage["completion_tokens"]
    facts = [
        f"{tokens} tokens in {timings['total_s']:.2f} s",
        f"first after {timings['ttft_s'] * 1e3:.0f} ms" if timings["ttft_s"] is not None else "",
        f"{tokens / drafts['target_steps']:.2f} tokens per step" if drafts["target_steps"] else "",
        f"drafts accepted {drafts['accepted']}/{drafts['drafted']}" if drafts["drafted"] else "",
        summary["finish_reason"],
        f"seed {summary['seed']}",
    ]
    console = Console(stderr=True, highlight=False)
    console.print("\n" + " · ".join(fact for fact in facts if fact), style="dim")


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 1
