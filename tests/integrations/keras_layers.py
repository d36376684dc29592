"""Models of Keras on PyTorch, split and in one process: ``weft run -n 2 tests/parity/keras_layers.py``."""

from __future__ import annotations

import json
import os
import sys

os.environ["KERAS_BACKEND"] = "torch"

import keras  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

import weft.torch as weft  # noqa: E402
from weft.errors import UsageError  # noqa: E402

L = keras.layers


def sequential():
    layers = [
        L.Dense(16, "tanh"),
        L.BatchNormalization(),
        L.Dropout(0.5, seed=3),
        L.Dense(16, "relu"),
        L.Dense(3),
    ]
    return keras.Sequential([keras.Input((6,)), *layers])


def functional():
    """A layer that is called twice, a model within the model, operations between layers, two outputs."""
    x = keras.Input((6,))
    first, twice = L.Dense(16, "tanh", name="one")(x), L.Dense(16)
    inner = keras.Sequential([keras.Input((16,)), L.Dense(16), L.LayerNormalization()])
    joined = L.Add()([twice(first), 0.5 * twice(first * 2.0)])
    return keras.Model(x, [L.Dense(3)(inner(joined)), L.Dense(2)(joined)])


class Blocks(keras.Model):
    """Layers in a list."""

    def __init__(self):
        super().__init__()
        self.first, self.blocks = L.Dense(16, "tanh"), [L.Dense(16, "relu") for _ in range(3)]
        self.last = L.Dense(3)

    def call(self, x, training=None):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def called(make):
    model = make()
    model(torch.ones(1, 6))
    return model


def masked():
    """A mask that goes through layers to the end."""
    x = keras.Input((6,))
    read = L.Embedding(9, 8, mask_zero=True)(L.Lambda(lambda t: (4 * t * t).long().clamp(0, 8))(x))
    read = L.Dense(16)(L.LSTM(16, return_sequences=True)(read))
    return keras.Model(x, L.Dense(3)(L.GlobalAveragePooling1D()(read)))


MODELS = {
    "sequential": sequential,
    "functional": functional,
    "blocks": lambda: called(Blocks),
    "masked": masked,
}
X = torch.linspace(-1, 1, 48).reshape(6, 8).T.contiguous()


def begun(make):
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    return make()


def loss_of(model, x):
    found = model(x, training=True)
    return sum((each**2).mean() for each in (found if isinstance(found, list) else [found]))


def one_process(make):
    model = begun(make)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        parts = [loss_of(model, part) / 2 for part in X.chunk(2)]
        for part in parts:
            part.backward()
        optimizer.step()
        losses.append(float(sum(parts)))
    weights = model.get_weights()
    states = [np.array(each) for each in model.variables if not any(each is known for known in model.weights)]
    return losses, weights, states


def fails(text, run):
    try:
        run()
    except UsageError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"nothing was raised where {text!r} was expected")


def main():
    weft.init({"microbatches": 2} | json.loads(sys.argv[1]))
    pipeline = weft.pp_size() == 2
    for name, make in MODELS.items():
        losses, weights, states = one_process(make)
        net = begun(make)
        model = weft.DistributedModel(net)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)

        @weft.step
        def step(model, x):
            loss = loss_of(model, x)
            model.backward(loss)
            return loss

        for expected in losses:
            optimizer.zero_grad()
            found = float(step(model, X).reduce_mean())
            assert abs(found - expected) < 1e-5, (name, found, expected)
            optimizer.step()
        if not pipeline:
            continue
        assert 0 < sum(each.numel() for each in model.local_parameters()) < sum(each.size for each in weights)
        own = {id(each) for each in (*model.local_parameters(), *model.local_buffers())}
        for variable, expected in zip(net.weights, weights, strict=True):
            if id(variable.value) in own:
                assert abs(variable.numpy() - expected).max() < 1e-5, (name, variable.path)
            else:
                fails("so its values are not here", variable.numpy)
        fails("so its values are not here", net.get_weights)
        whole = model.state_dict()
        values = sorted(float(each.double().sum()) for each in whole.values())
        expected = sorted(float(each.astype("float64").sum()) for each in (*weights, *states))
        assert np.allclose(values, expected, atol=1e-4), (name, values, expected)
        net.summary(print_fn=lambda text: None)
    fails("compile and fit of Keras are there with weft.tensorflow", lambda: model.compile("sgd", "mse"))
    fails("has no variables yet: call the model with an example", lambda: weft.DistributedModel(Blocks()))
    fails("takes an nn.Module, not object", lambda: weft.DistributedModel(object()))
    print("passed", flush=True)


if __name__ == "__main__":
    main()
