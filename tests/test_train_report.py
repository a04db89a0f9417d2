"""train.report: plain lines in a file, colours and a bar on a terminal, mistakes in a box."""

import io
import logging
import re

import pytest
from rich.console import Console

from train.errors import TrainingStopped, UsageError
from train.report import Report, ReportHandler, compared, duration, exit_code, print_error

RECORD = {
    "step": 5,
    "loss": 1.5,
    "bpb": 2.164,
    "lr": 1e-3,
    "grad_norm": 0.5,
    "step_ms": 250.0,
    "tokens_per_s": 8192.0,
    "mfu": None,
    "memory_gib": None,
}


def plain():
    file = io.StringIO()
    return Report(Console(file=file, highlight=False, width=40)), file


def test_a_step_is_one_plain_line_however_narrow_the_file():
    report, file = plain()
    with report.progress(0, 10):
        report.step(RECORD, 10, eta_s=75, score="bpb 2.164", printed=True)
        report.step(RECORD, 10, eta_s=75, score="bpb 2.164", printed=False)
    expected = (
        "step  5/10 | loss 1.5000 | bpb 2.164 | lr 1.00e-03 | grad norm 0.50 | 250 ms | 8,192 tok/s | "
        "mfu n/a | mem n/a | ETA 1m 15s\n"
    )
    assert file.getvalue() == expected


def test_waiting_is_announced_before_and_timed_after():
    report, file = plain()
    with report.wait("compiling"):
        assert file.getvalue() == "compiling ... "
    assert file.getvalue() == "compiling ... 0.0 s\n"


def test_what_is_logged_meanwhile_has_a_line_of_its_own():
    report, file = plain()
    logger = logging.Logger("library")
    logger.addHandler(ReportHandler(report))
    with report.wait("compiling"):
        logger.warning("there are %d things to know", 2)
    assert file.getvalue() == "compiling ... \nthere are 2 things to know\ncompiling ... 0.0 s\n"


def test_validation_stands_beside_the_bigram_model():
    report, file = plain()
    report.validation({"step": 5, "val_bpb": 2.5, "bigram_bpb": 3.5}, 1.0)
    assert (
        file.getvalue()
        == "validation at step 5 | val_bpb 2.500 | bigram_bpb 3.500 | 1.000 below the bigram model | 1.0 s\n"
    )
    assert compared(3.75, 3.5) == "0.250 above the bigram model"


def test_a_terminal_sees_a_bar_and_keeps_the_lines():
    file = io.StringIO()
    report = Report(Console(file=file, force_terminal=True, width=120, highlight=False))
    with report.wait("compiling"):
        pass
    with pytest.raises(KeyError), report.progress(0, 10):
        report.step(RECORD, 10, eta_s=75, score="bpb 2.164", printed=True)
        raise KeyError
    assert "\x1b[" in file.getvalue()
    assert "50%" in file.getvalue()
    assert "step  5/10 | loss 1.5000" in file.getvalue()


def test_a_sample_cannot_move_the_cursor():
    report, file = plain()
    report.sample(b"\ndef f():\n\treturn \x1b[2J\xff[red]")
    assert "def f():\n    return \N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}[red]\n" in file.getvalue()


def test_a_mistake_is_in_a_box_on_standard_error(capsys):
    print_error("Cannot train", "a [bold] line that is " + "very " * 20 + "long\nand another")
    out, err = capsys.readouterr()
    assert out == ""
    assert "a [bold] line that is " + "very " * 20 + "long" in err
    assert "Cannot train" in err.splitlines()[0]


def test_durations_are_readable():
    assert [duration(s) for s in (0.04, 9.96, 59.6, 185, 7620)] == ["0.0 s", "10 s", "1m 00s", "3m 05s", "2h 07m"]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (None, 0, ""),
        (UsageError("--x 3: 4 is wanted"), 2, "Cannot dig.*--x 3: 4 is wanted"),
        (TrainingStopped("at step 3", 143), 143, "Digging stopped.*at step 3"),
        (OSError(28, "No space left on device", "a.bin"), 1, "Digging stopped.*a.bin: No space left on device"),
        (KeyboardInterrupt(), 130, "Digging stopped.*nothing was dug"),
    ],
)
def test_every_end_has_its_exit_code(capsys, error, code, message):
    def command():
        if error is not None:
            raise error

    assert exit_code(command, "Cannot dig", "Digging stopped", "nothing was dug") == code
    assert re.search(message, capsys.readouterr().err, re.DOTALL)
