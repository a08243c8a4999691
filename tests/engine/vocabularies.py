"""Small tokenizers of the common kinds, made on the spot."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cache

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

CORPUS = (
    "안녕하세요 세계! 한국어 문장은 음절마다 여러 바이트로 나뉩니다. 값이 얼마예요?",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. Nechť již hříšné saxofony ďáblů rozezvučí síň.",
    "Family 👨‍👩‍👧‍👦, flags 🇨🇿🇰🇷🇯🇵, skin 👍🏽👍🏿, heart ❤️, keycap 1️⃣ done.",
    "東京の夜は静かです。我爱北京天安门。漢字と仮名。",
    "def f(x):\n    return x + 1\n\n\n\tfor i in   range(3):\n        print( i )\n",
    "e\u0301 a\u0308 o\u0302\u0323 combining; مرحبا بالعالم; नमस्ते दुनिया",
    " leading,  double  and trailing blanks   ",
)
SPECIAL = ("<unk>", "<s>", "</s>")
END = "</s>"


@cache
def byte_level(vocab_size: int = 420, corpus: Seq[str] = CORPUS) -> Tokenizer:
    """BPE over bytes (GPT-2, Llama 3, Qwen, SmolLM): tokens may hold parts of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """BPE over characters with a token per byte for the rest (Llama 2, Mistral). The decoder takes
    the first blank away, and turns a whole run of byte tokens into U+FFFD if it is not UTF-8."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += sorted("▁abcdefghijklmnopqrstuvwxyzDFNP.(),:;!+0123ř안한국")
    merges = [("▁", "a"), ("▁", "d"), ("i", "n"), ("r", "e"), ("▁", "▁"), ("▁▁", "▁▁"), ("▁d", "o")]
    pieces += [a + b for a, b in merges]
    model = models.BPE(
        {piece: i for i, piece in enumerate(pieces)},
        merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in SPECIAL])
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """Unigram over blanks-marked words (T5, XLM-R); its decoder too takes the first blank away."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, unk_token="<unk>", special_tokens=list(SPECIAL), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


KINDS = {"byte-level": byte_level, "byte-fallback": byte_fallback, "metaspace": metaspace}


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids
