"""What is computed from machine code: instructions a step, predicted times; and the report's way through JSON."""

import dataclasses
import json

import pytest

from pallas_kernels import gpu_report
from pallas_kernels.gpu_report import TARGETS, Case, Report
from pallas_kernels.machine_code import Kernel, Loop


def loop(instructions, exponentials, inner=()):
    return Loop(instructions, exponentials, exponentials, {"FFMA": instructions}, list(inner))


FORWARD = Kernel("selective_scan_forward (Mosaic)", 95, 0, 1000, [loop(160, 0, [loop(400, 64)])])
BACKWARD = Kernel("selective_scan_backward (Mosaic)", 255, 0, 1000, [loop(320, 0, [loop(160, 64), loop(1200, 64)])])
TRITON = Kernel("selective_scan_backward", 246, 0, 0, [loop(50, 0, [loop(400, 68), loop(600, 36)])])


@pytest.mark.parametrize(
    ("kernel", "instructions"),
    [(FORWARD, 160 / 16 + 400 / 4), (BACKWARD, (320 + 3 * 160 + 4 * 1200) / 16), (TRITON, 400 / 4 + 600 / 2)],
)
def test_instructions_a_step(kernel, instructions):
    """Mosaic's with the loop over tiles of 16 steps; Triton's by channel, a step for 16 exponentials."""
    assert gpu_report.per_step(kernel)[0] == instructions


def test_a_report_goes_through_json():
    report = Report("h200", [FORWARD, BACKWARD, TRITON], 1.5, 2.5)
    assert gpu_report.from_json(json.dumps(dataclasses.asdict(report))) == report


def test_predicted_times():
    case, target = Case(8, 2048, 2048, 16, "float32"), TARGETS["h200"]
    times = gpu_report.predicted_ms(FORWARD, case, target)
    assert times["issue"] == pytest.approx(110 * 2048 / 1.98e6)  # one program on each multiprocessor
    kept, sequence = 8 * 128 * 16 * 2048 * 4, 8 * 2048 * 2048 * 4
    assert times["bytes"] == pytest.approx((4 * sequence + kept) / 4800e9 * 1e3)
    # 256 programs of two channels a thread on 4 x 108 schedulers of an A100: one each.
    assert case.warps(TRITON.name, TARGETS["a100"]) == (2, 2048)
    # In bfloat16 half the bytes of a sequence.
    narrow = dataclasses.replace(case, dtype="bfloat16")
    assert narrow.bytes(FORWARD.name, target) == 2 * sequence + kept
