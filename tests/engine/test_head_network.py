"""A head over paged KV computes what its module does over the whole text at once."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from engine.features import FeaturePool, Tapped
from engine.head import HeadModule
from engine.head_network import HeadNetwork
from engine.kv_cache import KVCache, KVShape
from engine.model_input import ModelInput
from engine.network import make_network
from engine.request import SamplingParams
from engine.runner import ATTENTION, register_attention
from engine.types import Feed
from kernels.ops import REFERENCE, Ops, load_ops
from tests.engine.tiny import BLOCK, FAMILIES, VOCAB, tiny

BLOCKS, LENGTH = 12, 37
CPU = torch.device("cpu")
KNOWN = torch.tensor([3, 5, 7, 20, 21, 22, 23, 24, 25, 26, 27, 28, 40, 90, 91, 92, 95])
GREEDY = SamplingParams(0.0)
OPS = {"kernels": (load_ops("cpu"), True), "modules": (load_ops("cpu"), False),
       "reference": (REFERENCE, False)}  # fmt: skip


class Pair:
    """A tiny target and a head at random, over pools of their own."""

    def __init__(self, family: str, ops: Ops, strict: bool) -> None:
        register_attention()
        target = tiny(family)
        self.embedding = target.get_input_embeddings().weight.detach().clone()
        config = target.config
        torch.manual_seed(1)
        self.module = HeadModule(type(target), config, KNOWN).requires_grad_(False)
        self.module.lm.lm_head.weight.data = target.lm_head.weight.detach()[KNOWN].clone()
        self.whole = HeadModule(type(target), config, KNOWN).requires_grad_(False)
        self.whole.load_state_dict(self.module.state_dict())
        self.whole.lm.set_attn_implementation("eager")
        for model in (target, self.module.lm):
            model.set_attn_implementation(ATTENTION)
        head_dim = config.hidden_size // config.num_attention_heads
        shape = KVShape(1, config.num_key_value_heads, head_dim, torch.float32)
        cache, own = (
            KVCache.allocate(s, BLOCKS, BLOCK, CPU)
            for s in (KVShape(2, *(shape.kv_heads, head_dim, torch.float32)), shape)
        )
        self.features = FeaturePool(BLOCKS, BLOCK, config.hidden_size, torch.float32, CPU)
        network = make_network(target, cache, ops, 512, strict)
        self.target = Tapped(network, self.features)
        self.head = HeadNetwork(
            self.module,
            network,
            self.features,
            own,
            ops,
            context=512,
            rows=64,
            vocab_size=VOCAB,
            strict=strict,
        )

    def at_once(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states and log probabilities by the module; `features` are those of the tokens."""
        before = torch.nn.functional.pad(features[:-1], (0, 0, 1, 0))
        x = self.whole.fc(self.whole.normed(before, self.embedding[tokens]))[None]
        inner, positions = self.whole.lm.model, torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens),) * 2, -1e30).triu(1)[None, None]
        angles = inner.rotary_emb(x, positions)
        hidden = inner.layers[0](x, position_embeddings=angles, attention_mask=mask)
        return hidden[0], self.whole.lm.lm_head(inner.norm(hidden))[0].log_softmax(-1)


def batch_of(*feeds: Feed) -> ModelInput:
    return ModelInput.build(feeds, BLOCK, CPU)


def slots_of(blocks: list[int], length: int) -> Tensor:
    return torch.tensor([blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(length)])


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"mistral-window", "llama-untied-bias"}))
def test_in_pieces_it_computes_what_the_module_does_at_once(family: str, ops: str) -> None:
    """Two sequences, whose rows come mixed; with the target's states, then with one of its own."""
    pair = Pair(family, *OPS[ops])
    rng = random.Random(2)
    texts = [[rng.randrange(3, VOCAB) for _ in range(LENGTH)] for _ in range(2)]
    tables = [[3, 1, 6, 2], [5, 0, 4, 7]]
    with torch.inference_mode():
        feeds = [Feed(tuple(t), 0, b, 0, GREEDY) for t, b in zip(texts, tables, strict=True)]
        pair.target.logits(batch_of(*feeds))
        slots = [slots_of(b, LENGTH) for b in tables]
        states = [pair.features.rows[s].clone() for s in slots]
        expected = [pair.at_once(torch.tensor(t), s) for t, s in zip(texts, states, strict=True)]
        for start, end in ((0, 10), (10, 36), (36, LENGTH)):
            feeds = [
                Feed(tuple(t[start:end]), start, b, 1, GREEDY)
                for t, b in zip(texts, tables, strict=True)
            ]
            got = pair.head.logits(batch_of(*feeds)).clone()
            for row, (hidden, logits) in enumerate(expected):
                torch.testing.assert_close(got[row, KNOWN], logits[end - 1], rtol=1e-4, atol=1e-4)
                assert got[row].isneginf().sum() == VOCAB - len(KNOWN)
                left = pair.features.rows[slots[row][end - 1]]
                torch.testing.assert_close(left, hidden[end - 1], rtol=1e-4, atol=1e-4)
                if end < LENGTH:  # the target's states are what later rows read
                    pair.features.rows[slots[row]] = states[row]
        # The next token of a chain goes on from the head's own state.
        chain = pair.head.logits(batch_of(Feed((9,), LENGTH, tables[0], 1, GREEDY)))
        own = torch.cat((states[0][:-1], expected[0][0][-1:], states[0][:1]))
        _, logits = pair.at_once(torch.tensor([*texts[0], 9]), own)
        torch.testing.assert_close(chain[0, KNOWN], logits[-1], rtol=1e-4, atol=1e-4)


def test_hidden_states_go_with_their_blocks() -> None:
    pool = FeaturePool(4, BLOCK, 8, torch.float32, CPU)
    rows = torch.randn(BLOCK, 8)
    pool.write(torch.arange(BLOCK, 2 * BLOCK), rows)
    pool.copy_blocks([(1, 3), (3, 0)])  # all are read before any is written
    assert torch.equal(pool.rows[3 * BLOCK : 4 * BLOCK], rows)
    assert not pool.rows[:BLOCK].any()
    first = batch_of(Feed((1, 2), 0, [1], 0, GREEDY), Feed((3,), BLOCK, [3, 2], 0, GREEDY))
    before = pool.before(first)
    assert not before[0].any()  # nothing comes before the first token
    assert torch.equal(before[1:], rows[[0, BLOCK - 1]])


def test_a_pass_of_more_rows_than_there_is_room_for_is_refused() -> None:
    pair = Pair("llama", *OPS["reference"])
    with pytest.raises(ValueError, match="a pass of 65 rows"), torch.inference_mode():
        pair.head.logits(batch_of(Feed((1,) * 65, 0, range(8), 1, GREEDY)))
