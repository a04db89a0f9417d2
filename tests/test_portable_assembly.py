"""The PTX of the sums over channels, run by an emulator of a warp: no GPU is there to run it."""

import numpy as np
import pytest

from pallas_kernels.portable.assembly import LANES, channel_sums_ptx

OPERATIONS = {
    "mov": lambda a: a,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
    "add": lambda a, b: a + b,
    "and": lambda a, b: a & b,
    "setp": lambda a, b: a != b,
    "selp": lambda a, b, chosen: np.where(chosen, a, b),
}


def emulate(text, operands):
    """Run straight-line PTX for a warp; a register is an array with an entry for each lane."""
    lanes = np.arange(LANES)
    registers = dict(operands) | {"%laneid": lanes}

    def value(name):
        return registers[name] if name in registers else np.full(LANES, int(name.removeprefix("0f"), 0))

    for line in text.strip("{}").split(";"):
        operation, _, rest = line.strip().partition(" ")
        if not operation or operation == ".reg":
            continue
        target, *names = (name.strip() for name in rest.split(","))
        x = [value(name) for name in names]
        kind = operation.split(".")[0]
        if kind == "shfl":
            source = lanes ^ x[1] if ".bfly" in operation else x[1] % LANES
            registers[target] = x[0][source]
        else:
            registers[target] = OPERATIONS[kind](*x)
    return registers


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("per_lane", [1, 2])
@pytest.mark.parametrize("weight_of", [[0] * 16 + [1] * 16, [0] * 16, [0] * 3 + [1] * 3, [0], [1, 0, 1]])
def test_channel_sums(weight_of, per_lane, permuted):
    """Entry k of the result is sum k, wherever the lanes hold their channels."""
    rng = np.random.default_rng(0)
    rows, weights = rng.standard_normal((len(weight_of), LANES * per_lane)), rng.standard_normal((2, LANES * per_lane))
    channels = rng.permutation(LANES * per_lane) if permuted else np.arange(LANES * per_lane)
    of_lane = channels.reshape(LANES, per_lane)  # channel by lane and register
    arrays = [np.arange(LANES * per_lane), *rows, *weights]
    operands = {
        f"${(1 + i) * per_lane + e}": array[of_lane[:, e]] for i, array in enumerate(arrays) for e in range(per_lane)
    }
    registers = emulate(channel_sums_ptx(weight_of, 2, per_lane), operands)
    result = np.empty(LANES * per_lane)
    for e in range(per_lane):
        result[of_lane[:, e]] = registers[f"${e}"]
    wanted = np.sum(rows * weights[weight_of], axis=1)
    np.testing.assert_allclose(result[: len(weight_of)], wanted, atol=1e-12)
    if len(weight_of) > 2:  # what lies behind is zero up to the next power of two
        assert np.all(np.abs(result[len(weight_of) : 1 << (len(weight_of) - 1).bit_length()]) < 1e-12)
