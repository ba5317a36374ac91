"""Compression of messages: stated errors, values that are not finite, and the same bits from C and from numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpicoll.buffers import compression
from mpicoll.buffers.compression import BLOCK, ERROR_BOUNDS, NAMES, compress, count_message_bytes, decompress
from mpicoll.extension import find_compression

SIZES = (0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 70_001)

FORMS = [pytest.param(find_compression, id="c", marks=pytest.mark.extension), pytest.param(lambda: None, id="numpy")]


@pytest.fixture(params=FORMS, autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "find_compression", request.param)


def _values(size: int, spread: int = 20) -> Any:
    generator = np.random.default_rng(size)
    return (generator.standard_normal(size) * 10.0 ** generator.integers(-spread, spread + 1, size)).astype(np.float32)


def _send(name: str, values: Any, error: Any = None) -> Any:
    """Return what arrives of `values`."""
    message = np.empty(count_message_bytes(name, values.size), np.uint8)
    result, arrived = np.empty_like(values), np.ones_like(values)
    compress(name, values, message, error, result)
    decompress(name, message, arrived)
    np.testing.assert_array_equal(arrived, result)
    added = np.ones_like(values)
    decompress(name, message, added, add=True)
    np.testing.assert_array_equal(added, np.float32(1) + arrived)
    return arrived


def _magnitudes(name: str, values: Any) -> Any:
    """Return the magnitudes of which ERROR_BOUNDS states a part."""
    magnitudes = np.abs(values.astype(np.float64))
    if name == "bf16":
        return magnitudes
    padded = np.zeros(-(-values.size // BLOCK) * BLOCK)
    padded[: values.size] = magnitudes
    return np.repeat(padded.reshape(-1, BLOCK).max(axis=1), BLOCK)[: values.size]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_errors_are_within_the_bounds(name: str, size: int) -> None:
    values = _values(size)
    off = np.abs(_send(name, values).astype(np.float64) - values)
    assert (off <= ERROR_BOUNDS[name] * _magnitudes(name, values)).all()


@pytest.mark.parametrize("name", NAMES)
def test_bounds_are_reached(name: str) -> None:
    """A bound that is twice as large as necessary would state little."""
    values = np.linspace(1, 2, 10_000, dtype=np.float32)
    off = np.abs(_send(name, values).astype(np.float64) - values)
    assert (off / _magnitudes(name, values)).max() > 0.9 * ERROR_BOUNDS[name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_error_is_what_is_left_out(name: str, size: int) -> None:
    values, error = _values(size, 3), _values(size, 1)
    wanted = values + error
    arrived = _send(name, values, error)
    np.testing.assert_array_equal(error, wanted - arrived)


@pytest.mark.parametrize("name", NAMES)
def test_mean_converges_with_the_error(name: str) -> None:
    values, total, error = _values(1000, 2), np.zeros(1000), np.zeros(1000, np.float32)
    for _ in range(100):
        total += _send(name, values, error)
    off = np.abs(total / 100 - values)
    assert (off <= (1 / 100 + 1e-6) * ERROR_BOUNDS[name] * 1.1 * _magnitudes(name, values)).all()


def test_bf16_rounds_to_even_and_keeps_what_is_not_finite() -> None:
    bits = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF, 0x80000000, 1],
        np.uint32,
    )
    arrived = _send("bf16", bits.view(np.float32)).view(np.uint32)
    wanted = [0x3F800000, 0x3F820000, 0x3F810000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFF0000, 0x7F800000]
    assert arrived.tolist() == [*wanted, 0x80000000, 0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_int8_makes_a_block_nan(value: float) -> None:
    values = _values(3 * BLOCK + 5, 2)
    values[BLOCK + 3] = value
    error = np.ones_like(values)
    arrived = _send("int8", values, error)
    np.testing.assert_array_equal(np.isnan(arrived), np.arange(values.size) // BLOCK == 1)
    assert not error[BLOCK : 2 * BLOCK].any()  # it can't be sent later
    assert error[:BLOCK].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, 3.4e38])
def test_bf16_leaves_out_nothing_of_what_is_not_finite(value: float) -> None:
    values, error = np.array([value, 1.001], np.float32), np.zeros(2, np.float32)
    arrived = _send("bf16", values, error)
    assert not np.isfinite(arrived[0])
    assert error[0] == 0
    assert error[1] != 0


@pytest.mark.parametrize("size", [5, BLOCK, BLOCK + 3])
def test_int8_of_extreme_magnitudes(size: int) -> None:
    largest, smallest = np.full(size, np.finfo(np.float32).max), np.full(size, 1e-38, np.float32)
    largest[1::2] *= -1
    arrived = _send("int8", largest)
    assert np.isfinite(arrived).all()
    np.testing.assert_allclose(arrived, largest, rtol=1e-6)
    error = np.zeros(size, np.float32)
    np.testing.assert_array_equal(_send("int8", smallest, error), 0)
    np.testing.assert_array_equal(error, smallest)


@pytest.mark.extension
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_the_same_bits_without_the_extension(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = _values(size)
    if size > 3:
        values[[0, size // 2, -1]] = np.nan, -0.0, np.inf

    def run(form: Callable[[], Any]) -> list[bytes]:
        monkeypatch.setattr(compression, "find_compression", form)
        message, error = np.empty(count_message_bytes(name, size), np.uint8), np.full(size, 1e-3, np.float32)
        result, added = np.empty_like(values), np.ones_like(values)
        compress(name, values, message, error, result)
        decompress(name, message, added, add=True)
        return [one.tobytes() for one in (message, error, result, added)]

    assert run(find_compression) == run(lambda: None)


@pytest.mark.extension
@pytest.mark.parametrize("name", NAMES)
def test_arrays_need_not_be_aligned(name: str) -> None:
    values, wanted = np.empty(4 * 1000 + 1, np.uint8)[1:].view(np.float32), _values(1000)
    values[:] = wanted
    message = np.empty(count_message_bytes(name, 1000) + 1, np.uint8)[1:]
    result = np.empty(4 * 1000 + 1, np.uint8)[1:].view(np.float32)
    compress(name, values, message, None, result)
    np.testing.assert_array_equal(result, _send(name, wanted))


@pytest.mark.extension
def test_sizes_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "find_compression", find_compression)
    values = np.zeros(300, np.float32)
    with pytest.raises(ValueError, match="1200 bytes of float32 make a message of 308 bytes, got 300"):
        compress("int8", values, np.empty(300, np.uint8))
    with pytest.raises(ValueError, match="one length"):
        compress("int8", values, np.empty(308, np.uint8), np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="one length"):
        decompress("bf16", np.empty(2, np.uint8), values)
    with pytest.raises(ValueError, match="no compression 'zip'"):
        compress("zip", values, np.empty(308, np.uint8))
