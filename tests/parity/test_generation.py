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


ONLINE = """
import copy
import torch
import transformers
import weft.torch as weft

transformers.logging.set_verbosity_error()
weft.init({"partitions": 2, "microbatches": 4})
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
    bos_token_id=0, eos_token_id=1, pad_token_id=1,
)
net = transformers.LlamaForCausalLM(config)
plain = copy.deepcopy(net)
model = weft.DistributedModel(net)
optimizer_of = lambda net: torch.optim.SGD(net.parameters(), lr=0.5)
optimizer, alone = weft.DistributedOptimizer(optimizer_of(model)), optimizer_of(plain)
GROUP, NEW, ROUNDS = 4, 8, 4


def generate(model, prompts, seeds):
    torch.manual_seed(int(seeds[0]))
    mask = torch.ones_like(prompts)
    return model.generate(prompts, attention_mask=mask, do_sample=True, min_new_tokens=NEW, max_new_tokens=NEW)


def loss_of(model, tokens, advantages):
    logits = model(input_ids=tokens).logits[:, -NEW - 1 : -1]
    chosen = logits.log_softmax(-1).gather(-1, tokens[:, -NEW:, None]).squeeze(-1)
    return -(advantages[:, None] * chosen).mean()


@weft.step
def train_step(model, tokens, advantages):
    loss = loss_of(model, tokens, advantages)
    model.backward(loss)
    return loss


def update(tokens, advantages):
    optimizer.zero_grad()
    alone.zero_grad()
    mine = train_step(model, tokens, advantages).reduce_mean()
    loss = loss_of(plain, tokens, advantages)
    loss.backward()
    torch.testing.assert_close(mine.detach(), loss.detach(), rtol=1e-4, atol=1e-6)
    optimizer.step()
    alone.step()


generate_split = weft.step(generate)
update(torch.randint(2, 40, (16, 12)), torch.randn(16))  # this step is traced, and not one that generates
for number in range(ROUNDS):
    prompts = torch.randint(2, 40, (4, 3 + number)).repeat_interleave(GROUP, 0)
    seeds = 100 * number + torch.arange(len(prompts))
    with torch.no_grad():
        tokens = generate_split(model, prompts, seeds).concat()
        state = torch.get_rng_state()
        wanted = torch.cat([generate(plain, *part) for part in zip(prompts.chunk(4), seeds.chunk(4))])
        torch.set_rng_state(state)
    assert torch.equal(tokens, wanted), number
    rewards = (tokens[:, -NEW:] % 2 == 0).float().mean(1).view(-1, GROUP)
    update(tokens, ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten())
assert {order.limit for order in generate_split._orders.values()} == {4}, "fewer microbatches are in flight"
torch.testing.assert_close(model.state_dict(), dict(plain.state_dict()), rtol=1e-4, atol=1e-5)
own = plain.state_dict()
for name, tensor in weft.stream_weights(model):
    torch.testing.assert_close(tensor, own[name], rtol=1e-4, atol=1e-5)
"""


def test_a_loop_that_generates_and_trains_is_that_of_one_process() -> None:
    run_ranks(2, ONLINE, warm=True, timeout=120, options=["--quiet"]).check()


def test_generate_in_a_step_gives_the_tokens_of_one_process() -> None:
    run_ranks(2, SCRIPT, warm=True, timeout=120, options=["--quiet"]).check()
