"""The choices of programs for Keras: layers, heads, and the arguments of `compile` and `fit`."""

from __future__ import annotations

WIDTH, LENGTH, WORDS, SIDE = 6, 4, 9, 5
# Not Lion: it steps by the sign of a gradient, and where that is 0 the sign is that of the rounding.
# Adafactor does nearly the same with its own epsilon of 1e-30.
OPTIMIZERS = (
    "SGD({rate})",
    "SGD({rate}, momentum=0.9)",
    "Adam({rate})",
    "RMSprop({rate})",
    "AdamW({rate}, weight_decay=0.01)",
    "SGD({rate}, momentum=0.9, nesterov=True)",
    "Adagrad({rate})",
    "Adadelta({rate})",
    "Nadam({rate})",
    "Adamax({rate})",
    "Ftrl({rate})",
    "Lamb({rate})",
    "Adafactor({rate}, epsilon_1=1e-12)",
    "Adam({rate}, amsgrad=True)",
)
CHANGES = (
    "",
    "clipnorm=0.3",
    "clipvalue=0.05",
    "global_clipnorm=0.3",
    "weight_decay=0.01",
    "use_ema=True, ema_momentum=0.9",
    "gradient_accumulation_steps=2",
    "use_ema=True, ema_overwrite_frequency=2",
)
RATES = (
    "0.05",
    "0.01",
    "keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.9)",
    "keras.optimizers.schedules.CosineDecay(0.05, 10)",
)
HEADS = (
    (
        "L.Dense(3, name='{n}')",
        "labels",
        [
            "'sparse_categorical_crossentropy'",
            "losses.SparseCategoricalCrossentropy(from_logits=True)",
            "losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)",
            "losses.SparseCategoricalCrossentropy(from_logits=True, reduction='sum')",
        ],
        ["'accuracy'", "metrics.SparseTopKCategoricalAccuracy(2)", "'sparse_categorical_accuracy'"],
    ),
    (
        "L.Dense(2, name='{n}')",
        "numbers",
        [
            "'mse'",
            "losses.Huber(0.3)",
            "losses.LogCosh()",
            "'mae'",
            "lambda y, p: keras.ops.mean((y - p) ** 4, -1)",
            "losses.MeanSquaredError(reduction='mean_with_sample_weight')",
            "losses.CosineSimilarity()",
        ],
        [
            "'mae'",
            "metrics.RootMeanSquaredError()",
            "metrics.R2Score()",
            "metrics.MeanMetricWrapper(lambda y, p: keras.ops.abs(y - p), name='own')",
        ],
    ),
    (
        "L.Dense(1, 'sigmoid', name='{n}')",
        "flags",
        [
            "'binary_crossentropy'",
            "losses.BinaryFocalCrossentropy()",
            "losses.Hinge()",
            "losses.BinaryCrossentropy(label_smoothing=0.1)",
        ],
        ["'accuracy'", "metrics.AUC(num_thresholds=20)", "metrics.Precision()"],
    ),
    (
        "L.Dense(3, 'softmax', name='{n}')",
        "one_hot",
        [
            "'categorical_crossentropy'",
            "losses.KLDivergence()",
            "losses.CategoricalFocalCrossentropy()",
            "losses.Dice()",
        ],
        ["'accuracy'", "metrics.F1Score('macro')", "'categorical_accuracy'"],
    ),
)
"""The layer of a head, the kind of its labels, losses and metrics."""
FLAT = (
    "L.Dense({w}, 'tanh')",
    "L.Dense({w}, 'relu')",
    "L.LayerNormalization()",
    "L.Dropout(0.0)",
    "RESIDUAL",
    "L.BatchNormalization()",
    "SHARED",
    "L.Dense({w}, kernel_regularizer='l2', activity_regularizer=None)",
    "Scaled()",
    "Scaled(adds=True)",
    "NESTED",
    "Branched({w})",
    "L.Dropout(0.3)",
    "OPS",
    "L.PReLU()",
    "L.UnitNormalization()",
    "L.Dense({w}, use_bias=False, kernel_constraint='max_norm')",
    "Scaled(counts=True)",
    "L.GaussianNoise(0.1)",
    "L.GroupNormalization(2)",
    "SPLIT",
    "L.Lambda(lambda t: t * 0.5 + 0.1)",
    "L.Dense({w}, activity_regularizer='l2')",
    "L.EinsumDense('ab,bc->ac', {w})",
)
SEQUENCE = (
    "L.Dense({w}, 'tanh')",
    "L.LSTM({w}, return_sequences=True)",
    "L.GRU({w}, return_sequences=True)",
    "L.Bidirectional(L.LSTM({w}, return_sequences=True))",
    "ATTEND",
    "L.LayerNormalization()",
    "L.Conv1D({w}, 3, padding='same')",
    "L.SimpleRNN({w}, return_sequences=True)",
    "L.TimeDistributed(L.Dense({w}, 'tanh'))",
    "L.Masking(0.0)",
    "RESIDUAL",
    "L.Bidirectional(L.GRU({w}, return_sequences=True), merge_mode='sum')",
    "L.Dropout(0.0)",
    "GROUPED",
    "SHARED",
    "Scaled()",
    "L.BatchNormalization()",
    "L.SpatialDropout1D(0.2)",
    "CAUSAL",
    "L.RNN(L.StackedRNNCells([L.GRUCell({w}), L.LSTMCell({w})]), return_sequences=True)",
    "L.LSTM({w}, return_sequences=True, dropout=0.2, recurrent_dropout=0.2)",
    "L.DepthwiseConv1D(3, padding='same')",
    "L.Lambda(lambda t: t[:, ::-1])",
    "L.ZeroPadding1D(1)",
)
IMAGE = (
    "L.Conv2D({w}, 3, padding='same', activation='relu')",
    "L.BatchNormalization()",
    "L.SeparableConv2D({w}, 3, padding='same')",
    "L.MaxPooling2D(2, padding='same')",
    "L.DepthwiseConv2D(3, padding='same')",
    "RESIDUAL",
    "L.Conv2DTranspose({w}, 2, padding='same')",
    "L.Dropout(0.0)",
    "L.LayerNormalization()",
    "L.SpatialDropout2D(0.2)",
    "L.UpSampling2D(2)",
    "L.ZeroPadding2D(1)",
    "L.GroupNormalization(1)",
    "L.Conv2D({w}, 2, strides=2, padding='same')",
    "L.AveragePooling2D(2, padding='same')",
    "L.RandomFlip(seed=3)",
)
FLATTEN = {
    3: (
        "L.GlobalAveragePooling1D()",
        "L.LSTM({w})",
        "L.Flatten()",
        "L.GlobalMaxPooling1D()",
        "L.Bidirectional(L.GRU({w}))",
        "L.GRU({w}, reset_after=False)",
    ),
    4: ("L.GlobalAveragePooling2D()", "L.Flatten()", "L.GlobalMaxPooling2D()"),
}
DRAWS = ("Dropout(0.3", "Dropout1D", "Dropout2D", "Noise", "dropout=0.2", "RandomFlip")
"""Parts that draw random numbers."""
BY_BATCH = (*DRAWS, "BatchNorm", "counts=True")
"""Parts that compute something else in microbatches, by right."""
CALLBACKS = (
    "",
    "callbacks.EarlyStopping('loss', patience=0, min_delta=0.5)",
    "callbacks.ReduceLROnPlateau('loss', patience=0, min_delta=9, factor=0.5)",
    "callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)",
    "callbacks.TerminateOnNaN()",
    "callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: note(found, f'log {epoch}', dict(logs)))",
    "callbacks.LambdaCallback(on_train_batch_end=lambda at, logs: note(found, f'batch {at}', dict(logs)))",
    "callbacks.EarlyStopping('loss', patience=0, min_delta=0.5, restore_best_weights=True)",
    "callbacks.ModelCheckpoint(f'{tempfile.gettempdir()}/fuzz-{way.name()}.weights.h5', save_weights_only=True)",
    "callbacks.SwapEMAWeights()",
    "callbacks.EarlyStopping('val_loss', patience=0, min_delta=0.5)",
    "callbacks.LambdaCallback("
    "on_epoch_begin=lambda epoch, logs: setattr(model.optimizer, 'learning_rate', 0.01 / (epoch + 1)))",
    "callbacks.LambdaCallback("
    "on_epoch_end=lambda epoch, logs: note(found, f'iterations {epoch}', int(model.optimizer.iterations)))",
)
COMPILED = (
    "jit_compile=False",
    "run_eagerly=True",
    "jit_compile=False, auto_scale_loss=False",
    "jit_compile=False",
    "jit_compile=True",
    "jit_compile=False, steps_per_execution=2",
)
BETWEEN = (
    "",
    "model.optimizer.learning_rate = 0.02",
    "model.evaluate({x}, {y}, batch_size=4, verbose=0)",
    "net.layers[-1].trainable = False\n    compiled(model)",
    "compiled(model)",
    "model.predict({x}, batch_size=4, verbose=0)",
    "net.layers[1].trainable = False\n    compiled(model)",
    "model.reset_metrics()",
    "keras.utils.set_random_seed(9)",
)
