"""A drawn program for Keras as Python source, which is what runs.

The source runs by itself too: `python -m weft run -n 2 program.py`.
"""

from __future__ import annotations

import textwrap
from typing import Any

from tests.fuzz.keras.grammar import Block, Program
from tests.fuzz.keras.habits import (
    BETWEEN,
    BY_BATCH,
    CALLBACKS,
    CHANGES,
    COMPILED,
    DRAWS,
    FLAT,
    FLATTEN,
    HEADS,
    IMAGE,
    LENGTH,
    OPTIMIZERS,
    RATES,
    SEQUENCE,
    SIDE,
    WIDTH,
    WORDS,
)

HEAD = '''\
"""weft run -n {ranks} THIS_FILE"""
import os
import tempfile

import keras
import numpy as np
import tensorflow as tf

from tests.fuzz.keras.parts import Branched, Scaled, note

L, losses, metrics, callbacks = keras.layers, keras.losses, keras.metrics, keras.callbacks
SETTINGS = {settings}
DTYPE, TOLERANCE = {precision}
'''
TAIL = """
if __name__ == "__main__":
    from tests.fuzz.keras.beside import main

    main(globals())
"""


class Writer:
    """Writes a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.lines: list[str] = []
        self.names = 0
        self.linear: list[str] = []
        self.is_linear = not program.second and len(program.heads) == 1

    def new(self, text: str) -> str:
        self.names += 1
        self.lines.append(f"h{self.names} = {text}")
        return f"h{self.names}"

    def layer(self, text: str, h: str, rank: int) -> tuple[str, int]:
        self.linear.append(text)
        return self.new(f"{text}({h})"), rank

    def block(self, block: Block, h: str, rank: int) -> tuple[str, int]:
        table = {2: FLAT, 3: SEQUENCE, 4: IMAGE}[rank]
        text = table[block.kind % len(table)]
        width = (WIDTH, 4, 8)[block.picks[0] % 3]
        if text.islower() or "(" in text:
            return self.layer(text.format(w=width), h, rank)
        self.is_linear = False
        dense = "L.Conv2D(kernel_size=1, filters={})" if rank == 4 else "L.Dense({})"
        if text == "RESIDUAL":
            inner = self.new(f"{dense.format(f'{h}.shape[-1], activation={chr(34)}tanh{chr(34)}')}({h})")
            return self.new(f"L.Add()([{h}, {inner}])" if block.picks[1] % 2 else f"{h} + {inner}"), rank
        if text == "SHARED":
            shared = self.new(dense.format(f"{h}.shape[-1], activation='tanh'"))
            return self.new(
                f"{shared}({shared}({h}))"
                if block.picks[1] % 2
                else f"L.Concatenate()([{shared}({h}), {shared}({h} * 0.5)])"
            ), rank
        if text == "NESTED":
            inner = (
                "keras.Sequential(["
                + f"L.Dense({width}, 'tanh'), " * (1 + block.picks[1] % 2)
                + "L.LayerNormalization()])"
            )
            if block.picks[2] % 2:
                inside = self.new(f"keras.Input({h}.shape[1:])")
                inner = f"keras.Model({inside}, L.Dense({width}, 'tanh')({inside}) + 1.0)"
            return self.new(f"{inner}({h})"), rank
        if text == "OPS":
            ops = (
                "keras.ops.concatenate([{h}, keras.ops.sin({h})], -1)",
                "keras.ops.relu({h}) - 0.1",
                "keras.ops.where({h} > 0, {h}, 0.1 * {h})",
                "keras.ops.softmax({h}) * {h}",
                "keras.ops.stop_gradient({h}) * 0.5 + {h}",
                "keras.ops.cumsum({h}, -1)",
            )
            return self.new(ops[block.picks[1] % len(ops)].format(h=h)), rank
        if text == "SPLIT":
            left, right = (
                self.new(f"L.Dense({width}, 'relu')({h})"),
                self.new(f"L.Dense({width}, 'tanh')({h})"),
            )
            return self.new(
                f"L.{('Multiply', 'Maximum', 'Average', 'Subtract')[block.picks[1] % 4]}()([{left}, {right}])"
            ), rank
        if text == "GROUPED":
            return self.new(f"L.GroupQueryAttention(4, 4, 2)({h}, {h})"), rank
        more = (
            ", use_causal_mask=True"
            if text == "CAUSAL"
            else (", ", ", use_causal_mask=True")[block.picks[2] % 2].rstrip(", ")
        )
        attended = self.new(f"L.MultiHeadAttention(2, 4)({h}, {h}{more})")
        return (self.new(f"L.Add()([{h}, {attended}])") if block.picks[1] % 2 else attended), rank

    def input(self, kind: int, name: str) -> tuple[str, int]:
        if kind == 1:
            self.lines.append(f"{name} = keras.Input(({LENGTH},), dtype='int32', name='{name}')")
            return self.layer(f"L.Embedding({WORDS}, {WIDTH}, mask_zero=True)", name, 3)
        shape = {0: f"({WIDTH},)", 2: f"({LENGTH}, {WIDTH})", 3: f"({SIDE}, {SIDE}, 2)"}[kind]
        self.lines.append(f"{name} = keras.Input({shape}, name='{name}')")
        return name, {0: 2, 2: 3, 3: 4}[kind]

    def net(self) -> str:
        program = self.program
        h, rank = self.input(program.input, "a")
        if program.second:
            other, other_rank = self.input(program.second if program.second < 3 else 0, "b")
        for number, block in enumerate(program.blocks):
            h, rank = self.block(block, h, rank)
            if program.second and number == len(program.blocks) // 2:
                if rank > 2:
                    h, rank = self.layer(FLATTEN[rank][0], h, 2)
                if other_rank > 2:
                    other, other_rank = self.layer("L.GlobalAveragePooling1D()", other, 2)
                h = self.new(f"L.Concatenate()([{h}, L.Dense(4, 'relu')({other})])")
        last = program.blocks[-1].picks[3]
        if rank > 2 and not (
            rank == 3
            and last % 3 == 0
            and len(program.heads) == 1
            and program.heads[0] == 0
            and not program.second
        ):
            h, rank = self.layer(FLATTEN[rank][last % len(FLATTEN[rank])].format(w=WIDTH), h, 2)
        self.last_rank = rank
        outs = []
        for number, head in enumerate(program.heads):
            made, _ = self.layer(HEADS[head][0].format(n="pq"[number]), h, rank)
            outs.append(made)
        ins = "[a, b]" if program.second else "a"
        if program.second and program.pick("data", range(8)) in (3, 6):
            ins = "{'a': a, 'b': b}"
        single = len(outs) == 1
        self.dict_out = not single and program.pick("outputs", range(2)) == 1
        out = outs[0] if single else "[" + ", ".join(outs) + "]"
        if self.dict_out:
            out = "{" + ", ".join(f"'{'pq'[n]}': {each}" for n, each in enumerate(outs)) + "}"
        form = program.pick("form", range(5))
        if form in (1, 4) and self.is_linear:
            shape = {
                0: f"({WIDTH},)",
                1: f"({LENGTH},)",
                2: f"({LENGTH}, {WIDTH})",
                3: f"({SIDE}, {SIDE}, 2)",
            }[program.input]
            before = (
                []
                if form == 4
                else [f"keras.Input({shape}" + (", dtype='int32')" if program.input == 1 else ")")]
            )
            return f"def build():\n    return keras.Sequential([{', '.join([*before, *self.linear])}])\n"
        text = (
            "def build():\n"
            + textwrap.indent("\n".join(self.lines), "    ")
            + f"\n    net = keras.Model({ins}, {out})\n"
        )
        if form == 2 and single and not program.second and program.input != 1:
            text += (
                "    outer = keras.Input(net.inputs[0].shape[1:])\n"
                "    net = keras.Model(outer, L.Dense(3)(net(outer)))\n"
                if program.heads[0] == 0
                else ""
            )
        return text + "    return net\n"


def written(program: Program) -> str:
    """The program's source."""
    writer = Writer(program)
    net = writer.net()
    habit = program.habit
    keras_loop = habit in (0, 1, 2, 5)
    microbatches = program.pick("microbatches", (2, 1, 3, 4))
    if keras_loop and any(each in net for each in BY_BATCH):
        microbatches = 1
    settings: dict[str, Any] = {"microbatches": microbatches}
    settings |= program.pick("executor", ({}, {"executor": "eager"}, {}))
    settings |= program.pick(
        "pipeline",
        (
            {},
            {"pipeline": "gpipe"},
            {"pipeline": "interleaved_1f1b"},
            {"optimize": "memory"},
            {"contiguous": True},
        ),
    )
    if settings.get("pipeline") == "interleaved_1f1b" and microbatches % 2:
        settings.pop("pipeline")
    precision = '"float32", 0.003' if program.pick("dtype", range(8)) == 7 else '"float64", 1e-07'
    head = HEAD.format(ranks=program.ranks, settings=settings, precision=precision)
    return "\n".join(
        [head, net, data(program, writer), compile_of(program, writer), script(program, writer), TAIL]
    )


def data(program: Program, writer: Writer) -> str:
    count = program.pick("rows", (8, 8, 10, 7, 12))
    lines = ["draw = np.random.default_rng(1)", f"rows = {count}"]

    def made(kind: int) -> str:
        if kind == 1:
            there = f"(np.arange({LENGTH}) < draw.integers(1, {LENGTH} + 1, (rows, 1)))"
            return f"draw.integers(1, {WORDS}, (rows, {LENGTH})) * {there}"
        shape = {0: f"(rows, {WIDTH})", 2: f"(rows, {LENGTH}, {WIDTH})", 3: f"(rows, {SIDE}, {SIDE}, 2)"}[
            kind
        ]
        return f"draw.normal(size={shape}).astype(DTYPE)"

    lines.append(f"x = {made(program.input)}")
    if program.second:
        lines.append(f"b = {made(program.second)}")
        lines.append("x = {'a': x, 'b': b}" if program.pick("data", range(8)) in (3, 6) else "x = [x, b]")
    ys, weights = [], []
    for head in program.heads:
        rows = f"(rows, {LENGTH})" if writer.last_rank == 3 else "rows"
        if "ZeroPadding1D" in "".join(writer.lines + writer.linear) and writer.last_rank == 3:
            rows = f"(rows, {LENGTH} + 2 * {sum('ZeroPadding1D' in each for each in writer.linear)})"
        kind = HEADS[head][1]
        ys.append(
            {
                "labels": f"draw.integers(0, 3, {rows})",
                "numbers": "draw.normal(size=(rows, 2)).astype(DTYPE)",
                "flags": "draw.integers(0, 2, (rows, 1)).astype(DTYPE)",
                "one_hot": "np.eye(3, dtype=DTYPE)[draw.integers(0, 3, rows)]",
            }[kind]
        )
        weights.append("draw.random(rows).astype(DTYPE)")
    names = "pq"
    if len(ys) == 1:
        lines.append(f"y = {ys[0]}")
        lines.append(f"w = {weights[0]}")
    elif writer.dict_out:
        lines.append("y = {" + ", ".join(f"'{names[n]}': {each}" for n, each in enumerate(ys)) + "}")
        lines.append("w = {" + ", ".join(f"'{names[n]}': {each}" for n, each in enumerate(weights)) + "}")
    else:
        lines.append(f"y = [{', '.join(ys)}]")
        lines.append(f"w = [{', '.join(weights)}]")
    return "def data():\n" + textwrap.indent("\n".join(lines), "    ") + "\n    return x, y, w\n"


def compile_of(program: Program, writer: Writer) -> str:
    rate, change = program.pick("rate", RATES), program.pick("change", CHANGES)
    optimizer = program.pick("optimizer", OPTIMIZERS).format(rate=rate)
    if change and not (change.startswith("weight_decay") and "AdamW" in optimizer):
        optimizer = f"{optimizer[:-1]}, {change})"
    each, told = [], []
    for number, head in enumerate(program.heads):
        at = program.choices.get("loss", 0) + number
        loss = HEADS[head][2][at % len(HEADS[head][2])]
        if loss == "'sparse_categorical_crossentropy'":
            loss = "lambda y, p: losses.sparse_categorical_crossentropy(y, p, from_logits=True)"
        each.append(loss)
        table = HEADS[head][3]
        told.append(table[program.choices.get("metrics", 0) // 2 % len(table)])
    if writer.last_rank == 3:
        told = ["'accuracy'"]
    more = []
    if len(each) == 1:
        loss = each[0]
        shown = f"[{told[0]}]"
    else:
        form = 1 if writer.dict_out else program.pick("losses", range(3))
        loss = "{" + f"'p': {each[0]}, 'q': {each[1]}" + "}" if form == 1 else f"[{', '.join(each)}]"
        if form == 2 and program.heads == (1, 1):
            loss = "'mse'"
        shown = (
            "{" + f"'p': [{told[0]}], 'q': [{told[1]}]" + "}" if form == 1 else f"[[{told[0]}], [{told[1]}]]"
        )
        if program.pick("losses", range(4)) >= 2:
            more.append("loss_weights=" + ("{'p': 0.7, 'q': 0.3}" if form == 1 else "[0.7, 0.3]"))
    kind = program.pick("metrics", range(4))
    if kind:
        more.append(f"{('metrics', 'metrics', 'weighted_metrics')[kind - 1]}={shown}")
    options = program.pick("compiled", COMPILED)
    if any(part in line for line in writer.lines + writer.linear for part in DRAWS):  # others with XLA
        options = options.replace("jit_compile=True", "jit_compile=False")
    more.append(options)
    return (
        f"def optimizer():\n    return keras.optimizers.{optimizer}\n\n\n"
        f"def compiled(model):\n    model.compile(optimizer(), loss={loss}{''.join(f', {each}' for each in more)})\n"
    )


def script(program: Program, writer: Writer) -> str:
    habit = program.habit
    lines = ["x, y, w = data()", "net = build()"]
    if habit in (3, 4):
        lines += own_step(program, writer, habit)
    else:
        if program.pick("form", range(5)) == 3:
            lines += [
                "class Own(way.Model):",
                "    def __init__(self):\n        super().__init__()\n        self.net = net",
                "    def call(self, x, training=None):\n        return self.net(x, training=training)",
                "model = Own()",
            ]
        else:
            lines.append("model = way.wrap(net)")
        lines.append("compiled(model)")
        lines += loops(program, writer, habit)
    lines.append("return model")
    body = "\n".join(lines)
    return "def script(way, found):\n" + textwrap.indent(body, "    ") + "\n"


def loops(program: Program, writer: Writer, habit: int) -> list[str]:
    """By Keras's own loops."""
    several = len(program.heads) > 1
    batch = program.pick("epochs", (4, 4, 3, 5, 8))
    given = ["epochs=2", "verbose=0", "shuffle=False"]
    form = program.pick("data", range(8))
    weights = program.pick("weights", range(4))
    class_weight = weights == 2 and not several and program.heads[0] == 0 and writer.last_rank == 2
    weighted = weights in (1, 3)
    if form in (1, 4):
        parts = "(x, y, w)" if weighted else "(x, y)"
        more = ", drop_remainder=True" if form == 4 else ""
        lines = [
            "pack = lambda each: tuple(each) if isinstance(each, list) else each",
            f"source = tf.data.Dataset.from_tensor_slices(tuple(map(pack, {parts}))).batch({batch}{more})",
        ]
        first = "source"
    elif form == 5 and not program.second and not several:
        lines = [
            "def batches():\n    while True:",
            f"        for at in range(0, len(x), {batch}):",
            f"            yield x[at:at + {batch}], y[at:at + {batch}]",
        ]
        first = "batches()"
        given.append("steps_per_epoch=3")
    elif form == 7 and not program.second and not several:
        lines = [
            "class Batches(keras.utils.PyDataset):",
            "    def __len__(self):\n        return 2",
            "    def __getitem__(self, at):",
            "        return x[at * 3:(at + 1) * 3], y[at * 3:(at + 1) * 3]",
        ]
        first = "Batches()"
    else:
        lines = []
        first = "x, y"
        given.append(f"batch_size={batch}")
        if weighted:
            given.append("sample_weight=w")
        validation = program.pick("validation", range(4))
        if validation == 1:
            given.append("validation_data=(x, y)")
        elif validation == 2 and not several and not program.second:
            given.append("validation_split=0.4")
        elif validation == 3:
            given.append("validation_data=(x, y, w), validation_batch_size=3, validation_freq=2")
    if class_weight and form != 5:
        given.append("class_weight={0: 0.5, 1: 1.0, 2: 2.0}")
    callback = program.pick("callback", CALLBACKS)
    if callback and not ("val_loss" in callback and not any("validation" in each for each in given)):
        given.append(f"callbacks=[{callback}]")
    fit = f"model.fit({first}, {', '.join(given)}).history"
    told = f"model.evaluate(x, y, batch_size={batch}, verbose=0, return_dict=True)"
    if weighted:
        told = told.replace("batch_size", "sample_weight=w, batch_size")

    def note(what: str, call: str) -> str:
        return f"note(found, {what!r}, {call})"

    predict = f"note(found, 'prediction', model.predict(x, batch_size={batch}, verbose=0))"
    if habit == 2:
        plain = "x, y" + (", sample_weight=w" if weighted else "")
        lines = [
            note("batch 1", f"model.train_on_batch({plain}, return_dict=True)"),
            note("batch 2", f"model.train_on_batch({plain}, return_dict=True)"),
            note("tested", f"model.test_on_batch({plain}, return_dict=True)"),
            note("prediction", "model.predict_on_batch(x)"),
        ]
        return lines
    if habit == 5:
        lines += [note("before", told), predict.replace("'prediction'", "'first prediction'")]
    lines.append(note("history", fit))
    if habit == 1:
        between = program.pick("between", BETWEEN)
        if between:
            lines.append(between.replace("\n    ", "\n").format(x="x", y="y"))
        lines.append(note("again", fit))
    lines += [note("evaluated", told), predict]
    return lines


def own_step(program: Program, writer: Writer, habit: int) -> list[str]:
    """By a step of the script's own, in a loop of its own or in `train_step`."""
    kind = program.pick("step", range(8))
    several = len(program.heads) > 1
    lines = ["opt = optimizer()"]
    terms = []
    for number, head in enumerate(program.heads):
        out = "out" if not several else f"out['{'pq'[number]}']" if writer.dict_out else f"out[{number}]"
        label = "y" if not several else f"y['{'pq'[number]}']" if writer.dict_out else f"y[{number}]"
        at = program.choices.get("loss", 0) + number
        loss = HEADS[head][2][at % len(HEADS[head][2])]
        if loss.startswith("'"):
            loss = {
                "'sparse_categorical_crossentropy'": "(lambda *each: tf.reduce_mean("
                "losses.sparse_categorical_crossentropy(*each, from_logits=True)))",
                "'mse'": "losses.MeanSquaredError()",
                "'mae'": "losses.MeanAbsoluteError()",
                "'binary_crossentropy'": "losses.BinaryCrossentropy()",
                "'categorical_crossentropy'": "losses.CategoricalCrossentropy()",
            }[loss]
        elif loss.startswith("lambda"):
            loss = "(lambda y, p: tf.reduce_mean((y - p) ** 4))"
        elif "reduction" in loss or "ignore_class" in loss:
            loss = loss.split("(")[0] + ("(from_logits=True)" if "Sparse" in loss else "()")
        terms.append(f"{loss}({label}, {out})")
    body = [
        "with tf.GradientTape() as tape:",
        "    out = model(x, training=True)",
        f"    loss = {' + '.join(f'({each})' for each in terms)}",
        "    if model.losses:\n        loss += tf.add_n(model.losses)",
        "gradients = tape.gradient(loss, model.trainable_variables)",
    ]
    if kind == 1:
        body.append("gradients = tf.clip_by_global_norm(gradients, 0.2)[0]")
    if kind == 2:
        body.append(
            "gradients = [tf.clip_by_value(tf.convert_to_tensor(each), -0.05, 0.05) for each in gradients]"
        )
    body.append("return gradients, loss, out")
    text = textwrap.indent("\n".join(body), "    ")
    apply = ["gradients = [each.accumulate() for each in gradients]"]
    if kind == 3:
        apply.append("gradients = way.clip(gradients, 0.2)")
    if kind == 4:
        apply.append("gradients = [each * 0.5 for each in gradients]")
    apply.append("opt.apply_gradients(zip(gradients, model.trainable_variables))")
    batch = program.pick("epochs", (4, 3, 5, 8))
    if habit == 4:
        lines += [
            "class Own(way.Model):",
            "    def __init__(self):\n        super().__init__()\n        self.net = net",
            "        self.mean = metrics.Mean(name='loss')",
            "    def call(self, x, training=None):\n        return self.net(x, training=training)",
            "    def train_step(self, data):",
            "        gradients, loss, out = grads(*data)",
            textwrap.indent("\n".join(apply), "        ").replace("model.", "self."),
            "        self.mean.update_state(loss.reduce_mean())\n        return {'loss': self.mean.result()}",
            "    @property\n    def metrics(self):\n        return [self.mean]",
            "model = Own()",
            f"def get_grads(x, y):\n{text}",
            "grads = way.step(get_grads)",
            "model.compile()",
        ]
        lines += [
            "pack = lambda each: tuple(each) if isinstance(each, list) else each",
            f"source = tf.data.Dataset.from_tensor_slices((pack(x), pack(y))).batch({batch}, drop_remainder=True)",
            "history = model.fit(source, epochs=2, verbose=0).history",
            "note(found, 'history', history)",
        ]
    else:
        lines += ["model = way.wrap(net)", f"def get_grads(x, y):\n{text}", "grads = way.step(get_grads)"]
        graph = kind in (5, 6)
        call = "gradients, loss, out = grads(x, y)"
        function = "\n".join(
            [call, *apply, "return loss.reduce_mean(), tf.nest.map_structure(lambda each: each.merge(), out)"]
        )
        lines.append(
            ("@tf.function\n" if graph else "") + f"def train(x, y):\n{textwrap.indent(function, '    ')}"
        )
        lines += [
            "x, y = tf.nest.map_structure(tf.convert_to_tensor, (x, y))",
            "for number in range(3):",
            f"    a, b = tf.nest.map_structure(lambda each: each[number * 2:number * 2 + {batch}], (x, y))",
            "    loss, out = train(a, b)",
            "    found[f'loss {number}'] = loss",
            "    note(found, f'out {number}', out)",
        ]
    if kind == 7:
        lines += [
            "infer = way.step(lambda x: model(x, training=False))",
            "outs = infer(tf.nest.map_structure(tf.convert_to_tensor, x))",
            "outs = tf.nest.map_structure(lambda each: each.merge(), outs)",
            "note(found, 'inferred', outs)",
        ]
    return lines
