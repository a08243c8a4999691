"""Makes a ready directory (`engine.checkpoint`) of a GGUF file or of an incomplete directory.

    python -m engine.convert SOURCE OUT                 GGUF file or directory -> ready directory
    python -m engine.convert --truncate N SOURCE OUT    the first N layers of a ready directory

OUT appears at once and complete, or not at all. Exit status 2 and one line on stderr: the source
is at fault. With --tied the process ends when its standard input does, so that a converter never
outlives whoever started it. Reads and writes local files only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

from engine.checkpoint import ORIGIN, WEIGHTS, read_json, weight_files
from engine.errors import ModelError
from engine.gguf_file import GGUFFile
from engine.quantised import NATIVE, save_native

FORMAT = 2  # raise it when ready directories of older versions must be made again
LAYER = re.compile(r"\blayers\.(\d+)\.")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def convert_gguf(source: Path, out: Path) -> None:
    """Write `out` with the tensors of `source` as bfloat16. Raises ModelError."""
    file = GGUFFile(source)
    where: dict[str, Any] = {
        "pretrained_model_name_or_path": str(source.parent),
        "gguf_file": source.name,
        "local_files_only": True,
    }
    with _staged(out) as stage:
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                **where,
                dtype=torch.bfloat16,
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(**where)
        except (ValueError, KeyError, TypeError, RuntimeError, NotImplementedError) as error:
            raise ModelError(f"{source} cannot be converted: {error}") from error
        if missing := report["missing_keys"]:
            raise ModelError(f"{source}: the file lacks {', '.join(sorted(missing)[:3])}")
        model.generation_config = GenerationConfig(
            bos_token_id=model.config.bos_token_id,
            eos_token_id=file.eos_ids,
            pad_token_id=model.config.pad_token_id,
        )
        model.save_pretrained(stage, max_shard_size="1TB")
        c = model.config
        heads = c.num_attention_heads, getattr(c, "num_key_value_heads", c.num_attention_heads)
        parameters = dict(model.named_parameters())
        not_native = save_native(source, parameters, heads, stage / NATIVE)
        del model, parameters
        _drop_keys(stage / "config.json", "_model_name_or_path")
        tokenizer.model_max_length = file.context_length
        _save_tokenizer(tokenizer, stage)
        file.repair_tokenizer(stage / "tokenizer.json")
        # What AutoTokenizer makes of it for this architecture, so that the file alone says all.
        _save_tokenizer(AutoTokenizer.from_pretrained(stage, local_files_only=True), stage)
        _write_origin(stage, "gguf", source.name, _sha256(source), not_native)


def complete_directory(source: Path, out: Path) -> None:
    """Write `out` with a tokenizer.json made from slower tokenizer files, and links to the rest.

    Raises ModelError.
    """
    read_json(source, "config.json")
    weight_files(source)
    with _staged(out) as stage:
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
        except (ValueError, KeyError, TypeError, OSError, ImportError) as error:
            raise ModelError(f"{source}: no tokenizer can be made of it: {error}") from error
        _save_tokenizer(tokenizer, stage)
        for file in source.iterdir():
            link = stage / file.name
            if file.suffix in (".json", ".jinja", ".safetensors") and not link.exists():
                link.symlink_to(file.resolve())
        _write_origin(stage, "directory", str(source), "")


def truncate_layers(source: Path, out: Path, layers: int) -> None:
    """Write `out` with only the first `layers` layers of the ready directory `source`."""
    config = read_json(source, "config.json")
    if not 1 <= layers <= config["num_hidden_layers"]:
        raise ModelError(f"{source} has {config['num_hidden_layers']} layers, not {layers}")
    with _staged(out) as stage:
        tensors = {}
        for path in weight_files(source):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118, it is no mapping
                    layer = LAYER.search(name)
                    if layer is None or int(layer[1]) < layers:
                        tensors[name] = file.get_tensor(name)
        save_file(tensors, stage / WEIGHTS, metadata={"format": "pt"})
        config["num_hidden_layers"] = layers
        if config.get("layer_types"):
            config["layer_types"] = config["layer_types"][:layers]
        _write_json(stage / "config.json", config)
        for name in (*TOKENIZER_FILES, "generation_config.json", "chat_template.jinja"):
            if (source / name).is_file():
                shutil.copyfile(source / name, stage / name)
        _write_origin(stage, "truncated", f"{source.name}, {layers} layers", "")


@contextmanager
def _staged(out: Path) -> Iterator[Path]:
    """A directory beside `out` that becomes `out` when the block is done, and goes if it fails."""
    if out.exists():
        raise ModelError(f"{out} exists already")
    stage = out.with_name(out.name + ".partial")
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    try:
        yield stage
        for file in stage.iterdir():
            if not file.is_symlink():
                file.chmod(0o644)  # safetensors makes its files private
                with file.open("rb") as written:
                    os.fsync(written.fileno())  # else a power cut could leave only the name
        stage.rename(out)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _save_tokenizer(tokenizer: Any, directory: Path) -> None:
    if not tokenizer.is_fast:
        raise ModelError(f"{type(tokenizer).__name__} has no tokenizer.json form")
    tokenizer.save_pretrained(directory)
    _drop_keys(directory / "tokenizer_config.json", "is_local", "local_files_only")


def _drop_keys(path: Path, *keys: str) -> None:
    value = read_json(path.parent, path.name)
    _write_json(path, {k: v for k, v in value.items() if k not in keys})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_origin(directory: Path, kind: str, name: str, sha256: str, not_native: str = "") -> None:
    source = {"kind": kind, "name": name, "sha256": sha256}
    origin = {"format": FORMAT, "source": source, "transformers": transformers.__version__}
    if not_native:  # why quantised weights are not there as they were
        origin["not_native"] = not_native
    _write_json(directory / ORIGIN, origin)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _end_with_stdin() -> None:
    while os.read(0, 1):  # not sys.stdin, whose lock must be free when the interpreter ends
        pass
    os._exit(3)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.convert")
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--truncate", type=int, metavar="N", help="keep the first N layers")
    parser.add_argument("--tied", action="store_true", help="end when standard input does")
    args = parser.parse_args(argv)
    if args.tied:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        if args.truncate is not None:
            truncate_layers(args.source, args.out, args.truncate)
        elif args.source.is_dir():
            complete_directory(args.source, args.out)
        else:
            convert_gguf(args.source, args.out)
    except ModelError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
