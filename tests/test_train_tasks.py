"""train.tasks: sequences that can be answered, answers that are balanced, and two parts that share no sequence."""

import dataclasses

import numpy as np
import pytest

from train.config import TrainConfig
from train.errors import UsageError
from train.loss import NOT_ASKED
from train.tasks import InductionHeads, SelectiveCopying, is_held_out, make_task

COPYING = SelectiveCopying(seq_len=24, vocab_size=8, memorize_tokens=4)
INDUCTION = InductionHeads(seq_len=16, vocab_size=8)
PACKED = InductionHeads(seq_len=44, vocab_size=8, min_seq_len=10)
BOTH = pytest.mark.parametrize("task", [COPYING, INDUCTION], ids=lambda task: task.name)


def solve(task, tokens):
    """The answers to one sequence, from the words in which the task is described."""
    last = task.vocab_size - 1
    if isinstance(task, SelectiveCopying):
        return [token for token in tokens if 0 < token < last]
    return [tokens[tokens.index(last) + 1]]


@BOTH
def test_every_sequence_says_its_answers(task):
    batch = task.training_batch(seed=0, step=1, batch_size=200)
    assert batch.tokens.shape == batch.targets.shape == (200, task.seq_len)
    assert batch.tokens.dtype == batch.targets.dtype == np.int32
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        answers = solve(task, tokens)
        # They stand at the end, where the tokens only ask; nothing is asked elsewhere.
        assert targets == [NOT_ASKED] * (task.seq_len - len(answers)) + answers
        assert set(tokens[-len(answers) :]) == {task.vocab_size - 1}


def test_sequences_have_the_tokens_that_are_described():
    tokens = COPYING.training_batch(seed=0, step=1, batch_size=200).tokens
    data = (tokens > 0) & (tokens < 7)
    assert set(data.sum(axis=1)) == {4}
    assert not data[:, 20:].any()
    tokens = INDUCTION.training_batch(seed=0, step=1, batch_size=200).tokens
    assert set((tokens == 7).sum(axis=1)) == {2}
    assert set(np.argmax(tokens == 7, axis=1)) == set(range(14))


@BOTH
def test_answers_and_places_are_balanced(task):
    batch = task.training_batch(seed=0, step=1, batch_size=20_000)
    asked = batch.targets != NOT_ASKED
    counts = np.bincount(batch.targets[asked], minlength=task.vocab_size)
    counts = counts[counts > 0]
    assert len(counts) == task.n_answers
    # Each count is binomial: 5 standard deviations.
    mean = asked.sum() / task.n_answers
    assert np.abs(counts - mean).max() < 5 * mean**0.5
    # What is to be found stands at every place equally often.
    last = task.vocab_size - 1
    found = (batch.tokens > 0) & (batch.tokens < last) if task is COPYING else batch.tokens == last
    places = found[:, : -4 if task is COPYING else -2].sum(axis=0)
    assert np.abs(places - places.mean()).max() < 5 * places.mean() ** 0.5


@BOTH
def test_training_and_validation_share_no_sequence(task):
    training = np.concatenate([task.training_batch(seed=0, step=step, batch_size=500).tokens for step in range(20)])
    held_out = np.concatenate([batch.tokens for batch in task.validation_batches(n_batches=4, batch_size=500)])
    assert is_held_out(held_out).all()
    assert not is_held_out(training).any()
    assert not set(map(bytes, training)) & set(map(bytes, held_out))
    assert len(set(map(bytes, held_out))) > 1900


@BOTH
def test_a_sixteenth_is_held_out(task):
    tokens = task.draw(np.random.default_rng(0), 40_000).tokens
    assert is_held_out(tokens).mean() == pytest.approx(1 / 16, abs=5 * (1 / 16 / 40_000) ** 0.5)


@BOTH
def test_batches_depend_on_seed_and_step_alone(task):
    def tokens(seed, step):
        return task.training_batch(seed=seed, step=step, batch_size=8).tokens.tolist()

    expected = tokens(3, 5)
    tokens(3, 6)
    assert tokens(3, 5) == expected
    assert tokens(3, 6) != expected
    assert tokens(4, 5) != expected
    first, second = (next(task.validation_batches(n_batches=1, batch_size=8)).tokens for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_batches_are_the_same_in_every_version():
    # A resumed run must learn from what the interrupted one would have, under another NumPy too.
    tokens = INDUCTION.training_batch(seed=1, step=2, batch_size=2).tokens
    assert tokens.tolist() == [
        [0, 2, 0, 1, 5, 5, 0, 0, 0, 7, 6, 6, 2, 4, 5, 7],
        [1, 3, 0, 6, 6, 6, 7, 3, 0, 1, 3, 1, 2, 2, 5, 7],
    ]
    tokens = COPYING.training_batch(seed=1, step=2, batch_size=1).tokens
    assert tokens.tolist() == [[0, 0, 0, 0, 0, 1, 4, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 4, 0, 7, 7, 7, 7]]


def test_shorter_sequences_are_packed_into_rows():
    assert PACKED.lengths() == [44, 22, 11]
    batch = PACKED.training_batch(seed=0, step=1, batch_size=300)
    assert batch.segment_ids is not None
    assert batch.tokens.shape == batch.targets.shape == batch.segment_ids.shape == (300, 44)
    numbers = []
    for tokens, targets, ids in zip(batch.tokens, batch.targets, batch.segment_ids, strict=True):
        numbers.append(ids[-1] + 1)
        for part in np.split(np.arange(44), ids[-1] + 1):
            assert len(set(ids[part])) == 1
            assert targets[part].tolist() == [NOT_ASKED] * (len(part) - 1) + solve(PACKED, tokens[part].tolist())
            assert not is_held_out(tokens[part][None])
    assert np.abs(np.bincount(numbers)[[1, 2, 4]] - 100).max() < 50
    held_out = next(PACKED.validation_batches(n_batches=1, batch_size=5))
    assert held_out.segment_ids is None
    assert is_held_out(held_out.tokens).all()


def test_what_is_left_of_a_row_asks_nothing():
    task = SelectiveCopying(seq_len=25, vocab_size=16, min_seq_len=8, memorize_tokens=4)
    batch = task.training_batch(seed=0, step=1, batch_size=20)
    assert batch.segment_ids is not None
    (rest,) = np.nonzero(batch.segment_ids[:, -1] > 0)
    assert len(rest) > 0
    assert (batch.targets[rest, -1] == NOT_ASKED).all()
    assert (batch.segment_ids[rest, -1] > batch.segment_ids[rest, -2]).all()


def test_a_sequence_in_pieces_is_one_sequence():
    random = np.random.default_rng(0)
    places, answers = INDUCTION.questions(random, 50, 100)
    pieces = [INDUCTION.piece(random, places, answers, 100, slice(i, min(i + 7, 100))) for i in range(0, 100, 7)]
    tokens = np.concatenate(pieces, axis=1)
    assert tokens.shape == (50, 100)
    assert [solve(INDUCTION, row) for row in tokens.tolist()] == answers[:, None].tolist()
    assert set((tokens == 7).sum(axis=1)) == {2}
    assert (tokens[:, -1] == 7).all()


@BOTH
def test_another_size_is_another_task(task):
    prints = {task.fingerprint(), dataclasses.replace(task, vocab_size=9).fingerprint(), INDUCTION.fingerprint()}
    assert len(prints) == (3 if task is COPYING else 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "induction_heads", "data": "a.txt"}, "--data is for --task lm"),
        ({"task": "induction_heads", "seq_len": 3}, "--seq-len 3: induction_heads needs at least 4"),
        ({"task": "induction_heads", "vocab_size": 2}, "--vocab-size 2: induction_heads needs at least 3"),
        ({"task": "induction_heads", "vocab_size": 4, "seq_len": 8}, "only 4,374 different sequences of length 8"),
        ({"task": "induction_heads", "seq_len": 32, "min_seq_len": 3}, "--min-seq-len 3: induction_heads needs"),
        ({"task": "induction_heads", "seq_len": 32, "min_seq_len": 33}, "--min-seq-len 33 is above --seq-len 32"),
        ({"task": "selective_copying", "seq_len": 31}, "--seq-len 31: selective_copying needs at least 32"),
        ({"task": "selective_copying", "vocab_size": 3}, "--vocab-size 3: selective_copying needs at least 4"),
    ],
)
def test_what_makes_no_task_is_named(settings, message):
    with pytest.raises(UsageError, match=message):
        make_task(TrainConfig(**{"vocab_size": 16, **settings}))


def test_the_settings_make_the_task():
    config = TrainConfig(task="selective_copying", seq_len=40, vocab_size=16, memorize_tokens=5)
    assert make_task(config) == SelectiveCopying(seq_len=40, vocab_size=16, memorize_tokens=5)
    assert make_task(TrainConfig(task="induction_heads", vocab_size=16)) == InductionHeads(256, 16)
