"""Tiny models on disk: directories as transformers writes them, GGUF files as llama.cpp does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
TEXT = """def add(a, b):
    return a + b


table = [
    1,
    20,
]
for index in range(10):
    print(index, add(index, 100), "the quick brown fox jumps over the lazy dog", sep="\\t")
"""
CONFIGS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
CONTROL, NORMAL, UNUSED = 3, 1, 5


def tokenizer(vocab_size: int = 300) -> Tokenizer:
    """Byte-level BPE with the special tokens first, as SmolLM2 has it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT] * 4, trainer)
    return made


def model(
    family: str,
    *,
    rows: int,
    tied: bool,
    layers: int = 2,
    hidden: int = 32,
    scale: float = 1.0,
) -> PreTrainedModel:
    """Random, with weights that bfloat16 holds exactly."""
    config_class, model_class = CONFIGS[family]
    config = config_class(
        vocab_size=rows,
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(7)
    made = model_class(config).eval().requires_grad_(False)
    for parameter in made.parameters():
        parameter.copy_((torch.randn_like(parameter) * scale).bfloat16())
    return made


def write_directory(
    path: Path,
    *,
    family: str = "llama",
    rows: int = 320,
    tied: bool = True,
    vocab_size: int = 300,
    hidden: int = 32,
    scale: float = 1.0,
) -> Path:
    """A model directory as a publisher would upload it: bfloat16, fast tokenizer."""
    made = model(family, rows=rows, tied=tied, hidden=hidden, scale=scale)
    made.bfloat16().save_pretrained(path)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(vocab_size),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=TEMPLATE,
    ).save_pretrained(path)
    return path


def write_gguf(
    path: Path,
    source: PreTrainedModel,
    vocabulary: Tokenizer,
    extra: dict[str, Any] | None = None,
    kinds: Mapping[str, str] | None = None,
) -> Path:
    """`source` as llama.cpp's converter would write it, in float32, vocabulary padded to the rows.

    `extra` are metadata strings (or numbers, for those ending in `window`). `kinds`: the format of
    tensors by their kind, such as `attn_q`, with "" for the other matrices.
    """
    config = source.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    _add_vocabulary(writer, vocabulary, config.vocab_size)
    for key, value in (extra or {}).items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_string)(key, value)
    for name, tensor in source.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            _add_tensor(writer, _gguf_name(name), _as_stored(name, tensor, config), kinds or {})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Tokenizer, rows: int) -> None:
    bpe = json.loads(vocabulary.to_str())["model"]
    by_id = {i: token for token, i in vocabulary.get_vocab().items()}
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(rows)]
    kinds = [
        CONTROL if t in SPECIAL else NORMAL if i in by_id else UNUSED for i, t in enumerate(tokens)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, kinds: Mapping[str, str]
) -> None:
    kind = kinds.get(name.split(".")[-2], kinds.get("", "")) if tensor.ndim > 1 else ""
    if not kind:
        writer.add_tensor(name, tensor.numpy())
        return
    number = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), number), raw_dtype=number)


def _gguf_name(name: str) -> str:
    for old, new in (
        ("model.embed_tokens", "token_embd"),
        ("model.layers.", "blk."),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("post_attention_layernorm", "ffn_norm"),
        ("input_layernorm", "attn_norm"),
    ):
        name = name.replace(old, new)
    return name


def _as_stored(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """llama.cpp keeps the rows of Llama's q and k in pairs, not in halves, of each head."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    kind = name.split(".")[-2]
    if config.model_type != "llama" or kind not in heads:
        return tensor
    halves = tensor.view(heads[kind], 2, tensor.shape[0] // heads[kind] // 2, -1)
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()
