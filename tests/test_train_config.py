"""train.config: where settings come from, and what is said about those that are wrong."""

import dataclasses
import tomllib
from pathlib import Path

import pytest

from train.config import COMMAND_ONLY, TrainConfig, parse, read_toml, write_toml
from train.errors import UsageError

CONFIGS = Path(__file__).parent.parent / "configs"


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_defaults_come_before_file_and_file_before_flags(tmp_path):
    file = write(tmp_path / "a.toml", 'steps = 7\nlr = 1\nscan = "associative"\n')
    config = parse(["--config", file, "--steps", "9"])
    assert (config.steps, config.lr, config.scan) == (9, 1.0, "associative")
    assert config.batch_size == TrainConfig().batch_size
    assert isinstance(config.lr, float)


def test_default_run_is_bytes_toml():
    config = parse(["--config", str(CONFIGS / "bytes.toml")])
    assert dataclasses.replace(config, config=None) == TrainConfig()
    # The file is also the place to read what there is: it says every setting but those that have no value.
    named = tomllib.loads((CONFIGS / "bytes.toml").read_text(encoding="utf-8"))
    assert set(named) == {name for name, value in TrainConfig().settings().items() if value is not None}


def test_every_setting_is_a_flag():
    arguments = []
    config = TrainConfig(data="text", tokenizer="t.json", separator=0, init_from="x", keep_every=10, spike_factor=2.0)
    for name, value in config.settings().items():
        flag = "--" + name.replace("_", "-")
        arguments += [flag if value else "--no" + flag[1:]] if isinstance(value, bool) else [flag, str(value)]
    assert parse(arguments) == config


def test_written_settings_are_read_back_the_same(tmp_path):
    config = TrainConfig(
        data='a "quoted" \\ päth\x7f', sample_prompt="\n\t", lr=1e-5, dt_rank=3, remat=True, run_dir="x", resume=True
    )
    write_toml(tmp_path / "config.toml", config)
    read = dataclasses.replace(TrainConfig(), **read_toml(tmp_path / "config.toml"))
    assert read.settings() == config.settings()
    assert not set(COMMAND_ONLY) & set(tomllib.loads((tmp_path / "config.toml").read_text(encoding="utf-8")))


def test_resumed_run_keeps_its_settings(tmp_path):
    write_toml(tmp_path / "config.toml", TrainConfig(d_model=48, steps=5))
    config = parse(["--resume", "--run-dir", str(tmp_path), "--steps", "10"])
    assert (config.d_model, config.steps, config.run_dir) == (48, 10, str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step = 3", "unknown key step; perhaps you meant steps"),
        ("seq-len = 3", "unknown key seq-len; perhaps you meant seq_len"),
        ("qqqqqq = 3", r"unknown key qqqqqq$"),
        ("[model]\nd_model = 3", "unknown key model"),
        ("steps = 1.5", r"steps = 1.5: an integer is wanted"),
        ("steps = true", r"steps = True: an integer is wanted"),
        ('lr = "fast"', r"lr = 'fast': a number is wanted"),
        ("data = 3", r"data = 3: a string is wanted"),
        ('dt_rank = "all"', r"dt_rank = 'all': an integer or one of 'auto' is wanted"),
        ('scan = "fast"', "one of 'auto', 'sequential', 'associative', 'pallas' is wanted"),
        ("resume = true", r"resume is a flag of the command \(--resume\), not a setting"),
        ("steps = 1\nlr = = 2", "not valid TOML.*line 2"),
        ("step = 3\nlr = true", r"(?s)unknown key step.*lr = True"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path, text, message):
    with pytest.raises(UsageError, match=message) as error:
        parse(["--config", write(tmp_path / "a.toml", text)])
    assert "a.toml" in str(error.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"none\.toml: No such file"):
        parse(["--config", str(tmp_path / "none.toml")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps 0: 1 or more is wanted"),
        (["--lr", "0"], "--lr 0.0: a number above 0"),
        (["--lr", "nan"], "--lr nan"),
        (["--val-fraction", "1"], "--val-fraction 1.0: a number between 0 and 1"),
        (["--seed", "-1"], "--seed -1: a number from 0 to"),
        (["--vocab-size", "0"], "--vocab-size 0: 1 or more"),
        (["--min-seq-len", "8"], "--min-seq-len 8: --task lm has no use for it"),
        (["--task", "induction_heads", "--memorize-tokens", "8"], "--memorize-tokens 8: --task induction_heads has no"),
        (["--keep-every", "0"], "--keep-every 0: 1 or more"),
        (["--spike-factor", "1"], "--spike-factor 1.0: a number above 1"),
        (["--separator", "-1"], "--separator -1: 0 or more"),
        (["--dt-rank", "0"], "--dt-rank 0: 1 or more"),
    ],
)
def test_values_out_of_range_are_named(arguments, message):
    with pytest.raises(UsageError, match=message):
        parse(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--stps", "3"], "--steps"), (["--steps", "x"], "--steps"), (["--scan", "fast"], "sequential"), (["x"], "x")],
)
def test_wrong_flags_exit_with_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        parse(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
