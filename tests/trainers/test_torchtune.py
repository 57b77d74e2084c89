"""torchtune's context, made as by torchtune's recipes; in `make test-trainers`."""

import pytest
import torch
from scripts import ROOT, check_example

from ebbtide import compat
from ebbtide.compat import torchtune as ours

pytest.importorskip("torchtune", reason="make test-trainers installs it", exc_type=ImportError)


def steps(is_offloaded):
    """Three steps as of full_finetune_single_device: each layer checkpointed, as the recipe requires for offloading,
    and the context around the forward."""
    from torchtune import modules, training
    from torchtune.models.llama2 import llama2

    torch.manual_seed(0)
    model = llama2(vocab_size=64, num_layers=2, num_heads=2, num_kv_heads=1, embed_dim=32, max_seq_len=32)
    training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
    context = training.get_act_offloading_ctx_manager(model, is_offloaded)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for seed in range(3):
        tokens = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(seed))
        with context:
            logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, context, losses


@pytest.mark.filterwarnings("ignore")
def test_an_unmodified_recipe_computes_the_same_and_moves(monkeypatch):
    monkeypatch.setattr(ours.OffloadActivations, "settings", {"store": "mock"})
    plain, _, expected = steps(False)
    with compat.install("torchtune"):
        model, context, losses = steps(True)
    assert isinstance(context, ours.OffloadActivations)
    assert context.stats().parcels.count > 0
    assert losses == expected
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_the_example_trains_and_moves(tmp_path):
    check_example(ROOT / "examples" / "torchtune_compat.py", tmp_path)
