"""A bf16 model that computes in float32 for a while."""

from __future__ import annotations

import pytest
import torch

from engine.widened import widened
from tests.engine.tiny import FAMILIES, tiny

IDS = torch.arange(3, 40)[None]


@pytest.mark.parametrize("family", FAMILIES)
def test_it_gives_what_a_float32_model_of_the_same_weights_gives(family: str) -> None:
    model = tiny(family).bfloat16()
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    with torch.inference_mode():
        before = model(input_ids=IDS, use_cache=False).logits
        with widened(model):
            wide = model(input_ids=IDS, use_cache=False).logits
        after = model(input_ids=IDS, use_cache=False).logits
    assert wide.dtype == torch.float32
    assert torch.equal(before, after)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == places
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with torch.inference_mode():
        right = model.float()(input_ids=IDS, use_cache=False).logits
    # The angles of rotary positions are bf16 in the one, if anything is.
    torch.testing.assert_close(wide, right, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before.float(), right, rtol=1e-4, atol=1e-4)


def test_what_breaks_off_leaves_it_as_it_was() -> None:
    model = tiny("llama").bfloat16()
    with pytest.raises(IndexError), widened(model), torch.inference_mode():
        model(input_ids=torch.tensor([[10**6]]), use_cache=False)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
