"""``model.generate(...)`` of a model that is split over two processes gives the tokens that one process gives."""

from __future__ import annotations

from tests.launching import run_ranks

SCRIPT = """
import copy
import torch
import transformers
import weft.torch as weft

transformers.logging.set_verbosity_error()
weft.init({"partitions": 2, "microbatches": 1})
torch.manual_seed(0)
special = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
models = [
    transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=32, **special)),
    transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            num_layers=1, d_model=16, d_ff=32, num_heads=2, d_kv=8, decoder_start_token_id=0, vocab_size=64
        )
    ),
]
ways = [
    {"max_new_tokens": 9},
    {"max_new_tokens": 9, "do_sample": True, "top_k": 20},
    {"max_new_tokens": 5, "num_beams": 3, "use_cache": False},
]


@weft.step
def generate(model, ids, how):
    torch.manual_seed(3)
    return model.generate(ids, **how)


ids = torch.randint(2, 64, (3, 5))
for net in models:
    plain, model = copy.deepcopy(net).eval(), weft.DistributedModel(net.eval())
    for how in ways:
        torch.manual_seed(3)
        wanted = plain.generate(ids, **how)
        for _ in range(2):
            with torch.no_grad():
                assert torch.equal(generate(model, ids, how).concat(), wanted), (type(net).__name__, how)
    assert all(len(set(module._weft_owner for module in net.parameters())) == 2 for net in [model]), "one partition"
    try:
        model.generate(ids)
    except AttributeError as error:
        assert "call model.generate(...) in a function decorated with @weft.step" in str(error)
    assert not hasattr(model, "generate") and not hasattr(model, "nothing_of_this_name")
    try:
        model.config
    except AttributeError as error:
        assert str(error).endswith("the wrapped module's is model.module.config")

weft.init({"partitions": 2, "microbatches": 2})
with torch.no_grad():
    found = generate(model, ids[:2], ways[0]).outputs
for one, row in zip(found, ids[:2].split(1), strict=True):
    assert torch.equal(one, plain.generate(row, **ways[0]))
"""


def test_generate_in_a_step_gives_the_tokens_of_one_process() -> None:
    run_ranks(2, SCRIPT, warm=True, timeout=120, options=["--quiet"]).check()
