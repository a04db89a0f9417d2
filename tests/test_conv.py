import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax.conv import advance_window, causal_conv

BATCH, CHANNELS = 2, 3


def arrays(length, width, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (BATCH, length, CHANNELS), (width, CHANNELS), (CHANNELS,), (BATCH, width - 1, CHANNELS)
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)


def plain(x, weight, bias, window):
    """The definition, element by element, in float64."""
    x, weight, bias, window = (np.asarray(v, np.float64) for v in (x, weight, bias, window))
    width = weight.shape[0]
    inputs = np.concatenate([window, x], axis=1)
    y = np.zeros_like(x)
    for t in range(x.shape[1]):
        for k in range(width):
            y[:, t] += weight[k] * inputs[:, t + k]
    return y + bias


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 9])
def test_values(length, width):
    x, weight, bias, window = arrays(length, width)
    np.testing.assert_allclose(
        causal_conv(x, weight, bias, window=window), plain(x, weight, bias, window), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(causal_conv(x, weight), plain(x, weight, 0 * bias, 0 * window), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_any_split_is_one_pass(width):
    x, weight, bias, window = arrays(12, width)
    expected = causal_conv(x, weight, bias, window=window)
    parts, rest = [], window
    for start, stop in ((0, 0), (0, 1), (1, 3), (3, 4), (4, 12)):
        piece = x[:, start:stop]
        parts.append(causal_conv(piece, weight, bias, window=rest))
        rest = advance_window(rest, piece, width)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(rest, x[:, 12 - (width - 1) :])


@pytest.mark.parametrize("length", [1, 2])
def test_gradients_of_pieces_shorter_than_the_width(length):
    """fla 1140: finite differences in float64, with a window given."""
    with jax.enable_x64(True):
        arguments = [jnp.asarray(np.asarray(v, np.float64)) for v in arrays(length, 4)]

        def outputs(x, weight, bias, window):
            y = causal_conv(x, weight, bias, window=window)
            return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(advance_window(window, x, 4)))

        gradients = jax.grad(outputs, argnums=(0, 1, 2, 3))(*arguments)
        rng = np.random.default_rng(1)
        for i, gradient in enumerate(gradients):
            direction = rng.standard_normal(gradient.shape)
            shifted = [
                outputs(*arguments[:i], arguments[i] + step * direction, *arguments[i + 1 :]) for step in (1e-6, -1e-6)
            ]
            np.testing.assert_allclose((gradient * direction).sum(), (shifted[0] - shifted[1]) / 2e-6, rtol=1e-6)


def test_documents_do_not_leak():
    """state-spaces/mamba 180, 244: packed documents equal separate ones, with the window in the first."""
    x, weight, bias, window = arrays(9, 4)
    document = jnp.asarray([[0, 0, 1, 2, 2, 2, 2, 2, 3], [0] * 9])
    y = causal_conv(x, weight, bias, window=window, document=document)
    zeros = jnp.zeros_like(window)
    pieces = [(0, 0, 2, window), (0, 2, 3, zeros), (0, 3, 8, zeros), (0, 8, 9, zeros), (1, 0, 9, window)]
    for row, start, stop, before in pieces:
        separate = causal_conv(x[row : row + 1, start:stop], weight, bias, window=before[row : row + 1])
        np.testing.assert_allclose(y[row, start:stop], separate[0], rtol=1e-6, atol=1e-6)

    gradient = jax.grad(lambda x: causal_conv(x, weight, bias, document=document)[0, 3:].sum())(x)
    np.testing.assert_array_equal(gradient[0, :3], 0)
    assert jnp.abs(gradient[0, 3:]).min() > 0


def test_window_holds_the_last_document_only():
    x, _, _, window = arrays(4, 4)
    document = jnp.asarray([[0, 0, 1, 1], [0, 0, 0, 0]])
    rest = advance_window(window, x, 4, document=document)
    np.testing.assert_array_equal(rest[0], jnp.concatenate([jnp.zeros((1, CHANNELS)), x[0, 2:]]))
    np.testing.assert_array_equal(rest[1], x[1, 1:])


@pytest.mark.parametrize("lengths", [(0, 1), (2, 3), (4, 5)])
def test_window_of_ragged_rows(lengths):
    x, _, _, window = arrays(5, 4)
    rest = advance_window(window, x, 4, lengths=jnp.asarray(lengths))
    for row, length in enumerate(lengths):
        expected = jnp.concatenate([window[row], x[row, :length]])[-3:]
        np.testing.assert_array_equal(rest[row], expected)


def test_sum_is_in_float32():
    x = jnp.full((1, 4, 1), 1.0, jnp.bfloat16)
    weight = jnp.asarray([[256.0], [1.0], [1.0], [-256.0]])  # 256 + 1 is 256 in bfloat16
    y = causal_conv(x, weight)
    assert y.dtype == jnp.bfloat16
    assert y[0, 3, 0] == 2
