"""Collectives of JAX's arrays on the CPU, which mpicoll takes by DLPack: python jax_arrays.py"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import mpicoll

world = mpicoll.world()
ranks = range(world.size)


def make(rank: int) -> np.ndarray:
    return np.arange(24, dtype=np.float32).reshape(4, 6) * (rank + 1)


def check(found: object, expected: np.ndarray) -> None:
    """Raise AssertionError unless `found` is an array of JAX with the expected shape, dtype and values."""
    assert isinstance(found, jax.Array), type(found)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(np.asarray(found, dtype=np.float64), expected.astype(np.float64))


x = jnp.asarray(make(world.rank))
total = np.sum([make(rank) for rank in ranks], axis=0)
for _ in range(3):  # later calls take another way than the first one
    check(mpicoll.allreduce(x), total)
check(mpicoll.allreduce(jax.jit(lambda a: a * 2)(x), "max"), 2 * make(world.size - 1))
check(mpicoll.bcast(x, root=world.size - 1), make(world.size - 1))
check(mpicoll.allgather(x), np.concatenate([make(rank) for rank in ranks]))
check(mpicoll.allreduce(x.T), total.T)
check(mpicoll.allreduce(x.astype(jnp.bfloat16)), np.asarray(jnp.asarray(total, dtype=jnp.bfloat16)))
check(mpicoll.allreduce(jnp.float32(world.rank)), np.float32(sum(ranks)).reshape(()))
check(mpicoll.allreduce(x[:0]), total[:0])
check(mpicoll.iallreduce(x).wait(), total)
np.testing.assert_array_equal(np.asarray(x), make(world.rank))  # inputs are not changed

# The gradient of the mean over the samples of all ranks.
weights = jnp.ones(6)
gradient = jax.grad(lambda w: ((x @ w) ** 2).mean())(weights)
mean = mpicoll.allreduce(gradient, "avg")
alone = jax.grad(lambda w: ((jnp.concatenate([make(rank) for rank in ranks]) @ w) ** 2).mean())(weights)
np.testing.assert_allclose(np.asarray(mean), np.asarray(alone), rtol=1e-5)
if world.rank == 0:
    print(f"{world.size} ranks")
