"""The original's transformer layers compute what transformers' models compute, and what is not known is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from weft.compat.modelparallel.tensor_parallel import (
    DistributedAttentionLayer,
    DistributedTransformer,
    DistributedTransformerLayer,
    DistributedTransformerLMHead,
    DistributedTransformerOutputLayer,
)
from weft.compat.modelparallel.tensor_parallel.huggingface import (
    bert_hooks,
    gpt2_hooks,
    gptj_hooks,
    gptneo_hooks,
    translations,
)
from weft.errors import UsageError

transformers = pytest.importorskip("transformers")

LAYERS, HEADS, WIDTH, WORDS, LENGTH = 2, 4, 32, 50, 16
SHAPE = {
    "num_attention_heads": HEADS, "attention_head_size": WIDTH // HEADS, "hidden_size": WIDTH, "intermediate_size": 64,
}  # fmt: skip
WHOLE = {**SHAPE, "num_layers": LAYERS, "vocab_size": WORDS, "num_positions": LENGTH}
GPT2 = {
    **WHOLE, "activation": "gelu_new", "causal_mask_size": LENGTH, "pre_layernorm": True, "post_layernorm": False,
}  # fmt: skip


def bold(module: nn.Module) -> nn.Module:
    """The module in evaluation, with weights that are not too small to tell one computation from another."""
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.eval()


def gpt2(**more):
    return transformers.GPT2Config(
        n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, n_inner=64, vocab_size=WORDS, n_positions=LENGTH,
        bos_token_id=None, eos_token_id=None, **more,
    )  # fmt: skip


def bert(kind=None, **more):
    return (kind or transformers.BertConfig)(
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, hidden_size=WIDTH, intermediate_size=64, vocab_size=WORDS,
        **{"max_position_embeddings": LENGTH, **more},
    )  # fmt: skip


def words():
    """Words, the original's mask (1: masked) with padding, and labels."""
    torch.manual_seed(2)
    ids, masked = torch.randint(3, WORDS, (3, 10)), torch.zeros(3, 10, dtype=torch.long)
    masked[0, 7:] = 1
    return ids, masked, ids.masked_fill(masked == 1, -100)


def test_as_gpt2():
    to, back = translations("gpt2")
    theirs, ours = (
        transformers.GPT2LMHeadModel(gpt2()),
        DistributedTransformerLMHead(**GPT2, fused_softmax=True),
    )
    bold(ours), theirs.eval().load_state_dict(to(ours.state_dict(), max_seq_len=LENGTH))
    ids, masked, labels = words()
    expected = theirs(ids, attention_mask=1 - masked, labels=labels)
    with pytest.raises(UsageError, match="pass 1 - attention_mask"):
        ours((ids, 1 - masked, None, None, labels))
    loss, scores = ours((ids, masked, None, None, labels))
    seen = masked == 0
    assert torch.allclose(scores[seen], expected.logits[seen], atol=1e-5)
    assert torch.allclose(loss, expected.loss, atol=1e-5)
    assert torch.allclose(ours((ids, None, None, None, None)), theirs(ids).logits, atol=1e-5)
    again = back(theirs.state_dict())
    assert again.keys() == ours.state_dict().keys()
    assert all(torch.equal(value, again[name]) for name, value in ours.state_dict().items())
    assert back(again).keys() == again.keys() and to(theirs.state_dict()).keys() == theirs.state_dict().keys()
    assert to({f"module.{name}": value for name, value in again.items()}).keys() == {
        f"module.{name}" for name in theirs.state_dict()
    }
    with pytest.raises(UsageError, match="token_types is 0"):
        ours((ids, None, torch.zeros_like(ids), None, None))
    with pytest.raises(UsageError, match="num_positions is 16"):
        ours((ids.repeat(1, 2), None, None, None, None))
    with pytest.raises(UsageError, match="takes one tuple .input_ids, attention_mask"):
        ours(ids)
    with pytest.raises(UsageError, match="something else than bloom"):
        translations("bloom")[0](ours.state_dict())
    with pytest.raises(UsageError, match="position_embedding.weight has no place"):
        translations("gptj")[0](ours.state_dict())


def test_a_layer_as_gpt2s():
    from weft.compat.modelparallel.tensor_parallel.huggingface import layer_translations

    to, back = layer_translations("gpt2")
    theirs = bold(transformers.GPT2LMHeadModel(gpt2())).transformer.h[1].eval()
    ours = DistributedTransformerLayer(
        **SHAPE, activation="gelu_new", causal_mask_size=LENGTH, pre_layernorm=True, post_layernorm=False
    ).eval()  # fmt: skip
    ours.load_state_dict(back(theirs.state_dict()))
    states = torch.randn(2, 5, WIDTH)
    expected = theirs(
        states, attention_mask=torch.full((5, 5), torch.finfo(torch.float32).min).triu(1)[None, None]
    )
    expected = expected if isinstance(expected, torch.Tensor) else expected[0]
    assert torch.allclose(ours((states, None))[0], expected, atol=1e-5)
    again = to(ours.state_dict())
    assert again.keys() == theirs.state_dict().keys()
    assert all(torch.equal(value, again[name]) for name, value in theirs.state_dict().items())
    with pytest.raises(UsageError, match=r"lm_head\.weight has no place"):
        back({"lm_head.weight": torch.ones(1)})


def test_as_gpt2_with_other_states():
    to, _ = translations("gpt2")
    theirs = transformers.GPT2LMHeadModel(gpt2(add_cross_attention=True)).eval()
    ours = bold(DistributedTransformerLMHead(**GPT2, add_cross_attention=True))
    theirs.load_state_dict(to(ours.state_dict()))
    ids, states = words()[0], torch.randn(3, 5, WIDTH)
    mask = torch.zeros(3, 1, 1, 5)
    mask[1, ..., 3:] = torch.finfo(torch.float32).min
    expected = theirs(ids, encoder_hidden_states=states, encoder_attention_mask=(mask[:, 0, 0] == 0).long())
    scores = ours((ids, None, None, None, states, mask, None))
    assert torch.allclose(scores, expected.logits, atol=1e-5)


def gptj(**more):
    return transformers.GPTJConfig(
        n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, n_inner=64, vocab_size=WORDS, n_positions=LENGTH, rotary_dim=4,
        bos_token_id=None, eos_token_id=None, **more,
    )  # fmt: skip


def gptneo(**more):
    return transformers.GPTNeoConfig(
        num_layers=LAYERS, attention_types=[[["global", "local"], 1]], num_heads=HEADS, hidden_size=WIDTH,
        intermediate_size=64, vocab_size=WORDS, max_position_embeddings=LENGTH, window_size=3, bos_token_id=None,
        eos_token_id=None, **more,
    )  # fmt: skip


OTHERS = {
    "gptj": {
        **GPT2, "rotary_dim": 4, "use_parallel_residual": True, "qkv_bias": False, "dense_bias": False,
        "tie_word_embeddings": False, "lm_head_bias": True,
    },
    "gptneo": {
        **GPT2, "window_size": 3, "attention_layers": ["global", "local"], "scale_attention_scores": False,
        "qkv_bias": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_as_gptj_and_gptneo(kind):
    to, back = translations(kind)
    if kind == "gptj":
        theirs = transformers.GPTJForCausalLM(gptj())
    else:
        theirs = transformers.GPTNeoForCausalLM(gptneo())
    ours = DistributedTransformerLMHead(**OTHERS[kind], attention_in_fp32=True)
    bold(theirs), ours.eval().load_state_dict(back(theirs.state_dict()))
    again = to(ours.state_dict(), max_seq_len=LENGTH)
    assert again.keys() == theirs.state_dict().keys()
    assert all(torch.equal(value, again[name]) for name, value in theirs.state_dict().items())
    assert to(again).keys() == again.keys() and back(ours.state_dict()).keys() == ours.state_dict().keys()
    ids, masked, labels = words()
    expected = theirs(ids, attention_mask=1 - masked, labels=labels)
    loss, scores = ours((ids, masked, None, None, labels))
    seen = masked == 0
    assert torch.allclose(scores[seen], expected.logits[seen], atol=2e-5)
    assert torch.allclose(loss, expected.loss, atol=1e-5)
    assert torch.allclose(ours((ids, None, None, None, None)), theirs(ids).logits, atol=2e-5)
    expected.loss.backward(), loss.backward()
    gradients = back({name: p.grad for name, p in theirs.named_parameters()})
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5)
    if kind == "gptj":
        with pytest.raises(UsageError, match="position_ids are given, and rotary_dim"):
            ours((ids, None, None, torch.zeros_like(ids), None))


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_as_bert(kind):
    to, back = translations(kind)
    if kind == "bert":
        theirs = transformers.BertModel(bert(), add_pooling_layer=False)
    else:
        config = bert(transformers.RobertaConfig, max_position_embeddings=LENGTH + 2, type_vocab_size=2)
        theirs = transformers.RobertaModel(config, add_pooling_layer=False)
    bold(theirs)
    ours = DistributedTransformerLMHead(
        **WHOLE, num_token_types=2, layernorm_epsilon=1e-12, add_lm_head=False
    ).eval()
    ours.load_state_dict(back(theirs.state_dict()))
    ids, masked, _ = words()
    types = torch.randint(2, ids.shape)
    expected = theirs(ids, attention_mask=1 - masked, token_type_ids=types).last_hidden_state
    actual = ours((ids, masked, types, None, None))
    assert torch.allclose(actual[masked == 0], expected[masked == 0], atol=1e-5)
    theirs.load_state_dict(
        {name.removeprefix(f"{kind}."): value for name, value in to(ours.state_dict()).items()}
    )
    assert torch.allclose(
        theirs(ids, token_type_ids=types).last_hidden_state, ours((ids, None, types, None, None)), atol=1e-5
    )
    with pytest.raises(UsageError, match=r"pooler.dense.weight has no place"):
        back({f"{kind}.pooler.dense.weight": torch.ones(1)})


def test_a_state_keeps_its_names_where_no_such_model_is(monkeypatch):
    monkeypatch.setattr(DistributedTransformerLMHead, "any_built", False)
    state = transformers.GPT2LMHeadModel(gpt2()).state_dict()
    assert translations("gpt2")[1](state).keys() == state.keys()


def test_alibi_and_attention_in_32_bits():
    from weft.compat.modelparallel.layers import FlashAttentionLayer

    layer = bold(DistributedAttentionLayer(HEADS, 8, WIDTH, causal_mask_size=LENGTH, use_alibi=True))
    flash = FlashAttentionLayer(attention_head_size=8, triton_flash_attention=True, use_alibi=True).eval()
    x = torch.randn(2, 6, WIDTH)
    qkv = torch.stack([each(x).view(2, 6, HEADS, 8) for each in (layer.query, layer.key, layer.value)], 2)
    mixed = flash(qkv, causal=True).transpose(1, 2).flatten(2)
    expected = layer.post_layernorm(x + layer.dense(mixed))
    assert torch.allclose(layer((x, None)), expected, atol=1e-5)
    assert torch.allclose(layer((x, torch.zeros(2, 1, 1, 6))), expected, atol=1e-5)
    half = DistributedTransformerLayer(
        **SHAPE, attention_in_fp32=True, fp32_residual_addition=True
    ).bfloat16()
    hidden, mask = half((x.bfloat16(), None))
    assert hidden.dtype == torch.bfloat16 and mask is None


def test_the_norms_and_the_first_weights():
    both = bold(DistributedTransformerOutputLayer(8, 16, activation="relu", pre_layernorm=True))
    x = torch.randn(2, 3, 8)
    inner = both.dense2(torch.relu(both.dense1(both.pre_layernorm(x))))
    assert torch.allclose(both(x), both.post_layernorm(x + inner))
    drawn = DistributedTransformer(1, **SHAPE, use_normal_initialization=True, initializer_range=0.5)
    dense = drawn.seq_layers[0].output.dense1
    assert 0.4 < dense.weight.std() < 0.6 and not dense.bias.any()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"pre_layernorm": False, "post_layernorm": False},
            "needs pre_layernorm=True or post_layernorm=True",
        ),
        ({"activation": "glu"}, "activation is 'glu': choose gelu, gelu_new"),
        ({"rotary_pct": 0.5}, "has no argument rotary_pct"),
        ({"rotary_dim": 5}, "rotary_dim is 5: choose an even number up to attention_head_size, 8"),
        ({"window_size": 3}, "window_size is 3, and causal_mask_size None"),
        ({"use_parallel_residual": True}, "write pre_layernorm=True, post_layernorm=False"),
        ({"attention_layers": ["global"]}, "say global or local for each of the 2 layers"),
        ({"attention_layers": ["global", "local"]}, "say their window_size"),
        ({"zero_init": True}, "does not support zero_init=True"),
    ],
)
def test_what_is_refused(given, text):
    with pytest.raises(UsageError, match=text):
        DistributedTransformerLMHead(**{**WHOLE, **given})


def test_more_positions_than_the_causal_mask():
    layer = DistributedTransformerLayer(**SHAPE, causal_mask_size=4)
    with pytest.raises(UsageError, match="5 positions, and causal_mask_size is 4"):
        layer((torch.randn(1, 5, WIDTH), None))
    with pytest.raises(UsageError, match="cross attention knows no order"):
        DistributedAttentionLayer(HEADS, 8, WIDTH, cross_attention=True, causal_mask_size=4)


@pytest.mark.parametrize("kind", ["gpt2", "bert", "gptj", "gptneo"])
def test_layers_of_transformers_are_replaced(kind):
    """Through the contexts, the hooks and the translation, the model computes what it did."""
    from weft.compat.modelparallel.tensor_parallel import contexts
    from weft.compat.modelparallel.tensor_parallel.translation import from_hf

    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("layers of earlier versions give a tuple")
    name, hooks = {
        "gpt2": ("GPT2Block", gpt2_hooks), "bert": ("BertLayer", bert_hooks), "gptj": ("GPTJBlock", gptj_hooks),
        "gptneo": ("GPTNeoBlock", gptneo_hooks),
    }[kind]  # fmt: skip
    folder = "gpt_neo" if kind == "gptneo" else kind
    models = getattr(getattr(transformers.models, folder), f"modeling_{folder}")
    registered = type(name, (getattr(models, name),), {})
    contexts.tp_register_with_module(registered, DistributedTransformerLayer, *hooks())
    with pytest.MonkeyPatch.context() as patch, contexts.tensor_parallelism(fused_softmax=True):
        patch.setattr(models, name, registered)
        if kind == "bert":
            theirs = bold(transformers.BertModel(bert(), add_pooling_layer=False))
        elif kind == "gpt2":
            theirs = bold(transformers.GPT2LMHeadModel(gpt2()))
        elif kind == "gptj":
            theirs = bold(transformers.GPTJForCausalLM(gptj()))
        else:
            theirs = bold(transformers.GPTNeoForCausalLM(gptneo()))
    ours = contexts.replaced(copy.deepcopy(theirs))
    layers = ours.encoder.layer if kind == "bert" else ours.transformer.h
    assert all(isinstance(each, DistributedTransformerLayer) and not each.training for each in layers)
    DistributedTransformerLMHead(1, 1, 8, 8, 8, 8, 8)  # so that states are translated
    state = from_hf(theirs.state_dict(), kind)
    layers.load_state_dict(
        {name.removeprefix("transformer.seq_layers."): v for name, v in state.items() if "seq_layers" in name}
    )
    ids, masked, _ = words()
    options = {} if kind == "bert" else {"use_cache": False}
    for mask in (None, 1 - masked):
        expected, actual = (each(ids, attention_mask=mask, **options)[0] for each in (theirs, ours))
        seen = masked == 0
        assert torch.allclose(actual[seen], expected[seen], atol=1e-5)
    if kind != "bert":
        with pytest.raises(UsageError, match="use_cache=False"):
            ours(ids)
    if kind == "gptj":
        with pytest.raises(UsageError, match="without position_ids"):
            ours(ids, use_cache=False, position_ids=torch.ones_like(ids))
    if kind == "gpt2":
        with pytest.raises(UsageError, match="does not take encoder_hidden_states"):
            ours(ids, use_cache=False, encoder_hidden_states=torch.ones(*ids.shape, theirs.config.n_embd))


class Doubled(nn.Module):
    def __init__(self, width, bias=True):
        super().__init__()
        self.linear = nn.Linear(width, width, bias)

    def forward(self, x, factor=2.0):
        return {"y": factor * self.linear(x)}


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Doubled(4), Doubled(4, bias=False)


def test_which_modules_are_replaced():
    from weft.compat.modelparallel.tensor_parallel import contexts

    class Other(nn.Module):
        def __init__(self, size, bias, more=None):
            super().__init__()
            self.linear, self.more = nn.Linear(size, size, bias), more

        def forward(self, x):
            return self.linear(x)

    contexts.tp_register(
        Other,
        init_hook=lambda width, bias=True: ((width,), {"bias": bias}),
        forward_hook=lambda x, factor=2.0: ((factor * x,), {}),
        return_hook=lambda result: {"y": result},
    )(Doubled)
    outside = contexts.replaced(Outer())
    assert isinstance(outside.first, Doubled), "they were not built inside"
    with contexts.tensor_parallelism(more=3):
        net = Outer()
        with contexts.tensor_parallelism(False):
            net.third = Doubled(4)
    contexts.set_tensor_parallelism(net.second, False)
    tied = copy.deepcopy(net)
    assert contexts.replaced(net) is net
    assert isinstance(net.first, Other) and net.first.more == 3 and net.first.linear.bias is not None
    assert isinstance(net.second, Doubled) and isinstance(net.third, Doubled)
    net.first.linear.bias.data.zero_()
    x = torch.ones(1, 4)
    assert torch.allclose(net.first(x, factor=3.0)["y"], net.first.linear(3.0 * x))
    assert torch.equal(copy.deepcopy(net.first)(x)["y"], net.first(x)["y"])
    tied.second.linear.weight = tied.first.linear.weight
    assert isinstance(contexts.replaced(tied).first, Doubled), "it shares a weight"
    contexts.set_tensor_parallelism(tied.third)
    assert isinstance(contexts.replaced(tied.third), Other), "a model as a whole"


def test_what_cannot_be_registered():
    from weft.compat.modelparallel.tensor_parallel import contexts

    with pytest.raises(UsageError, match="takes classes of nn.Module, not None"):
        contexts.tp_register(None)(Doubled)

    class Third(Doubled):
        pass

    contexts.tp_register(Doubled, init_hook=lambda width: width)(Third)
    with contexts.tensor_parallelism():
        third = Third(4)
    with pytest.raises(UsageError, match=r"the init_hook .* gave int: return \(args, kwargs\)"):
        contexts.replaced(third)


@pytest.mark.parametrize("wanted", [True, False])
def test_model_creation_with_tensor_parallelism_is_that_context(wanted):
    from weft.compat.modelparallel import interface
    from weft.compat.modelparallel.tensor_parallel import contexts

    class Before(nn.Module):
        pass

    class After(nn.Module):
        def __init__(self, fused_softmax=False):
            super().__init__()
            self.fused_softmax = fused_softmax

    interface.tp_register_with_module(Before, After)
    with interface.model_creation(tensor_parallelism=wanted, dtype=torch.float32, fused_softmax=True):
        net = nn.Sequential(Before(), nn.Linear(2, 2))
    net.append(Before())
    contexts.replaced(net)
    assert isinstance(net[0], After) is wanted and isinstance(net[2], Before)
    assert not wanted or net[0].fused_softmax
