"""Update rules on numpy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from mpicoll.errors import ArgumentError

Array: TypeAlias = np.ndarray[Any, Any]

State: TypeAlias = dict[str, Any]
"""State of a rule between two updates of the same weights. Arrays of the shape of the weights are kept by element:
an update of some rows changes these rows only."""

Rule: TypeAlias = Callable[[Array, Array, State, int], None]
"""``rule(weights, gradient, state, step)`` changes `weights` in place. `step` counts the updates of these weights from
1. A server calls it for each of its buckets, which are flat pieces of the model, and for rows of a tensor with sparse
gradients, of which it may have none in an update; it must treat each element alike."""

LearningRate: TypeAlias = "float | Callable[[int], float]"
"""A learning rate, or a function that returns that of an update, whose number counts from 1."""


class SGD:
    """Stochastic gradient descent, as ``torch.optim.SGD`` computes it.

    Args:
        lr: the learning rate, or a function of the number of the update.
        momentum: the factor of the velocity.
        weight_decay: the factor of the weights that is added to the gradient.
        nesterov: use Nesterov's momentum.

    Example:
        >>> weights = np.zeros(2)
        >>> mpicoll.parallel.parameter_server.SGD(lr=0.5)(weights, np.ones(2), {}, 1)
        >>> weights
        array([-0.5, -0.5])
    """

    def __init__(
        self, lr: LearningRate, momentum: float = 0.0, weight_decay: float = 0.0, *, nesterov: bool = False
    ) -> None:
        self.lr = _check_lr("SGD", lr)
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.nesterov = nesterov

    def __call__(self, weights: Array, gradient: Array, state: State, step: int) -> None:
        if self.weight_decay:
            gradient = gradient + self.weight_decay * weights
        if self.momentum:
            velocity = state.get("momentum_buffer")
            if velocity is None:
                velocity = state["momentum_buffer"] = np.zeros_like(weights)
            velocity *= self.momentum
            velocity += gradient
            gradient = gradient + self.momentum * velocity if self.nesterov else velocity
        weights -= _lr_at(self.lr, step) * gradient


class Adam:
    """Adam, as ``torch.optim.Adam`` computes it; with `decoupled` weight decay as ``torch.optim.AdamW``.

    Args:
        lr: the learning rate, or a function of the number of the update.
        betas: the factors of the running averages of the gradient and of its square.
        eps: what is added to the denominator.
        weight_decay: the factor of the weights that is added to the gradient.
        decoupled: subtract the weight decay from the weights instead.

    Example:
        >>> weights = np.zeros(2)
        >>> mpicoll.parallel.parameter_server.Adam(lr=0.5)(weights, np.ones(2), {}, 1)
        >>> weights.round(3)
        array([-0.5, -0.5])
    """

    def __init__(
        self,
        lr: LearningRate = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled: bool = False,
    ) -> None:
        self.lr = _check_lr("Adam", lr)
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.decoupled = decoupled

    def __call__(self, weights: Array, gradient: Array, state: State, step: int) -> None:
        lr, (first, second) = _lr_at(self.lr, step), self.betas
        if self.weight_decay and self.decoupled:
            weights *= 1 - lr * self.weight_decay
        elif self.weight_decay:
            gradient = gradient + self.weight_decay * weights
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = np.zeros_like(weights), np.zeros_like(weights)
        average, square = state["exp_avg"], state["exp_avg_sq"]
        average += (1 - first) * (gradient - average)
        square *= second
        square += (1 - second) * gradient * gradient
        denominator = np.sqrt(square) / np.sqrt(1 - second**step) + self.eps
        weights -= lr / (1 - first**step) * (average / denominator)


def _check_lr(name: str, lr: LearningRate) -> LearningRate:
    if not callable(lr) and not lr >= 0:
        raise ArgumentError(f"{name}: lr must be a number of at least 0, or a function of the step, got {lr!r}")
    return lr


def _lr_at(lr: LearningRate, step: int) -> float:
    return lr(step) if callable(lr) else lr


class ArrayUpdater:
    """Weights of a server as numpy arrays, which a rule updates. `memories` are the weights of each bucket."""

    def __init__(self, rule: Rule, weights: list[Array], rows: list[int]) -> None:
        self._rule = rule
        self._weights = weights
        self._rows = rows
        self._states: list[State] = [{} for _ in weights]
        self._steps = [0] * len(weights)

    @staticmethod
    def view(memory: Array, dtype: str) -> Array:
        """Return `memory`, which is bytes, as an array of `dtype`."""
        return memory.view(np.dtype(dtype))

    @staticmethod
    def cast(values: Array, dtype: str) -> Array:
        """Return `values` in `dtype`."""
        return values.astype(dtype)

    @staticmethod
    def add(total: Array, more: Array) -> None:
        total += more

    @staticmethod
    def scale(gradient: Array, factor: float) -> None:
        gradient *= factor

    @staticmethod
    def sum_of_squares(gradient: Array) -> float:
        # In float64, whatever the dtype.
        return float(np.square(gradient, dtype=np.float64).sum())

    def update(self, index: int, gradient: Array) -> None:
        """Update bucket `index`."""
        self._steps[index] += 1
        self._rule(self._weights[index], gradient, self._states[index], self._steps[index])

    def add_rows(self, index: int, pieces: list[tuple[Array, Array]]) -> tuple[Array, Array]:
        """Return the distinct rows of `pieces`, which are rows and values, and the sums of their values in order."""
        width = self._rows[index]
        rows, places = np.unique(np.concatenate([rows for rows, _ in pieces]), return_inverse=True)
        values = np.concatenate([values for _, values in pieces]).reshape(-1, width)
        total = np.zeros((len(rows), width), values.dtype)
        np.add.at(total, places.reshape(-1), values)
        return rows, total

    def update_rows(self, index: int, rows: Array, values: Array) -> None:
        """Update some rows of bucket `index`."""
        self._steps[index] += 1
        table = self._weights[index].reshape(-1, self._rows[index])
        state = self._states[index]
        some = {
            key: value.reshape(table.shape)[rows] if _is_like(value, table) else value for key, value in state.items()
        }
        weights = table[rows]
        self._rule(weights, values, some, self._steps[index])
        table[rows] = weights
        for key, value in some.items():
            if isinstance(value, np.ndarray) and value.shape == weights.shape:
                if not _is_like(state.get(key), table):
                    state[key] = np.zeros(table.size, value.dtype)
                state[key].reshape(table.shape)[rows] = value
            else:
                state[key] = value

    @staticmethod
    def join(pieces: list[Array]) -> Array:
        """Return a copy of the pieces, one after the other."""
        return np.concatenate(pieces)

    def end_step(self) -> None:
        """Do nothing: a rule has the number of the update."""


def _is_like(value: Any, table: Array) -> bool:
    return isinstance(value, np.ndarray) and value.size == table.size
