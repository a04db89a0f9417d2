"""train.metrics: lines that survive a kill and a resume, and the plot."""

import json

from train.metrics import Metrics, draw_loss, read_metrics


def write(path, step, records):
    metrics = Metrics(path, step)
    for record in records:
        metrics.write(record)
    metrics.close()


def test_each_line_is_an_object_and_on_disk_at_once(tmp_path):
    metrics = Metrics(tmp_path / "m.jsonl", 0)
    metrics.write({"step": 1, "loss": 1 / 3})
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"step": 1, "loss": 1 / 3}
    metrics.close()


def test_numbers_that_are_not_finite_are_null(tmp_path):
    write(tmp_path / "m.jsonl", 0, [{"step": 1, "loss": float("nan"), "grad_norm": float("inf")}])
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1, "loss": null, "grad_norm": null}\n'


def test_resuming_takes_out_what_comes_after_the_checkpoint(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, 0, [{"step": step} for step in (1, 2, 3)])
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # killed while writing
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]
    write(path, 2, [{"step": 3}, {"step": 4}])
    assert path.read_text() == "".join(f'{{"step": {step}}}\n' for step in (1, 2, 3, 4))


def test_plot_is_drawn_from_any_number_of_records(tmp_path):
    training = [{"step": step, "bpb": 8 / step} for step in range(1, 50)]
    validation = [{"step": 49, "val_bpb": 2.0, "bigram_bpb": 3.0}]
    for records in ([], training[:1], validation, training + validation, [*training, {"step": 50, "bpb": None}]):
        draw_loss(records, tmp_path / "loss.png", "title")
        assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]
