"""train.data: batches depend on (seed, step) alone."""

import numpy as np

from train.data import training_batch, validation_batches
from train.tokens import Part, Tokens


def text_of(tokens):
    return Tokens([Part(np.asarray(tokens, np.uint8))])


TEXT = text_of(range(256))


def test_batches_are_windows_with_the_next_byte_as_target():
    batch = training_batch(TEXT, seed=0, step=1, batch_size=64, seq_len=16)
    assert batch.tokens.shape == batch.targets.shape == (64, 16)
    assert batch.tokens.dtype == batch.targets.dtype == np.int32
    np.testing.assert_array_equal(batch.tokens + 1, batch.targets)
    assert len(set(batch.tokens[:, 0])) > 32


def test_every_place_can_be_drawn_and_none_beyond():
    firsts = {
        first
        for step in range(200)
        for first in training_batch(text_of(range(20)), seed=0, step=step, batch_size=4, seq_len=16)
        .tokens[:, 0]
        .tolist()
    }
    assert firsts == {0, 1, 2, 3}


def test_batches_depend_on_seed_and_step_alone():
    def tokens(seed, step):
        return training_batch(TEXT, seed=seed, step=step, batch_size=8, seq_len=16).tokens.tolist()

    expected = tokens(3, 5)
    tokens(3, 6)
    assert tokens(3, 5) == expected
    assert tokens(3, 6) != expected
    assert tokens(4, 5) != expected


def test_batches_are_the_same_in_every_version():
    # A resumed run must read what the interrupted one would have read, under another NumPy too.
    batch = training_batch(TEXT, seed=1, step=2, batch_size=4, seq_len=8)
    assert batch.tokens[:, 0].tolist() == [159, 111, 232, 106]


def test_validation_covers_the_held_out_text_evenly():
    batches = list(validation_batches(TEXT, n_batches=4, batch_size=4, seq_len=15))
    starts = np.concatenate([batch.tokens[:, 0] for batch in batches])
    np.testing.assert_array_equal(starts, np.arange(0, 241, 16))
    assert batches[-1].targets[-1, -1] == 255
    # A text of one sequence gives that sequence.
    (only,) = validation_batches(text_of(range(17)), n_batches=1, batch_size=2, seq_len=16)
    np.testing.assert_array_equal(only.tokens, np.stack([np.arange(16)] * 2))


def test_a_separator_begins_a_document():
    text = text_of([5, 0, 7, 8, 0, 9, 9])
    (batch,) = validation_batches(text, n_batches=1, batch_size=1, seq_len=6, separator=0)
    assert batch.tokens.tolist() == [[5, 0, 7, 8, 0, 9]]
    assert batch.segment_ids.tolist() == [[0, 1, 1, 1, 2, 2]]
    assert batch.segment_ids.dtype == np.int32
    assert training_batch(text, seed=0, step=1, batch_size=1, seq_len=6).segment_ids is None
