"""train.profile: which steps are traced."""

import jax
import pytest

from train.errors import UsageError
from train.profile import Profile, profiled_steps


def test_steps():
    assert profiled_steps("10:12") == (10, 12)
    assert profiled_steps(None) is None
    for text in ("10", "0:3", "5:4", "a:b", "1:2:3", ""):
        with pytest.raises(UsageError, match="START:STOP is wanted"):
            profiled_steps(text)


@pytest.mark.parametrize("stop", [3, 9])
def test_a_trace_begins_and_ends_where_it_should(tmp_path, monkeypatch, stop):
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append(("start", step)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append(("stop", step)))
    profile, ended = Profile((2, stop), tmp_path), []
    for step in range(1, 5):
        profile.before(step)
        ended.append(profile.after(step))
    # The run's end cuts a trace short.
    assert profile.close() == (tmp_path if stop == 9 else None)
    assert profile.close() is None
    assert calls == [("start", 2), ("stop", min(stop, 4))]
    assert ended == [None, None, tmp_path if stop == 3 else None, None]


def test_a_trace_is_written(tmp_path):
    profile = Profile((1, 1), tmp_path)
    profile.before(1)
    jax.block_until_ready(jax.numpy.zeros(3) + 1)
    assert profile.after(1) == tmp_path
    assert list(tmp_path.rglob("*.xplane.pb"))
