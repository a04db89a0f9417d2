"""train.sharding and train.devices: on eight virtual devices a step is what it is on one, and each holds its share."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from train.config import TrainConfig
from train.data import Batch, training_batch
from train.devices import make_mesh, whole
from train.errors import UsageError
from train.mesh import check_mesh, parse_mesh
from train.optim import make_optimizer
from train.sharding import abstract, abstract_batch, partition, place_batch, shardings
from train.step import build_model, compile_train_step, init_optimizer, make_loss, make_train_step, model_config
from train.tokens import Part, Tokens

CONFIG = TrainConfig(d_model=16, n_layer=2, d_state=4, seq_len=32, batch_size=8, scan="sequential")
TEXT = Tokens([Part(np.random.default_rng(0).integers(0, 256, 3000).astype(np.uint8))])
PAIRS = list(itertools.combinations(("data", "fsdp", "seq", "tensor"), 2))


def batch_on(mesh, config=CONFIG):
    def read(rows):
        return training_batch(
            TEXT, seed=0, step=1, batch_size=config.batch_size, seq_len=config.seq_len, rows=rows
        )  # fmt: skip

    return place_batch(mesh, (config.batch_size, config.seq_len), read)


def loss_and_gradients(mesh):
    graphdef, params = build_model(model_config(CONFIG), 0, mesh)
    options = {"xla_backend_optimization_level": 0}
    with jax.set_mesh(mesh):
        function = jax.jit(jax.value_and_grad(make_loss(graphdef)), compiler_options=options)
        return whole(function(params, batch_on(mesh)))


@pytest.fixture(scope="module")
def on_one_device():
    return loss_and_gradients(make_mesh(""))


@pytest.mark.parametrize("axes", PAIRS, ids="-".join)
def test_losses_and_gradients_are_those_of_one_device(axes, on_one_device):
    sizes = dict(zip(axes, (2, 4) if axes[1] != "tensor" else (4, 2)))
    loss, gradients = loss_and_gradients(make_mesh(",".join(f"{name}={size}" for name, size in sizes.items())))
    np.testing.assert_allclose(loss, on_one_device[0], rtol=1e-5)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(on_one_device[1]))
    for got, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(on_one_device[1]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * largest)


def compiled_step(mesh, config):
    graphdef, params = build_model(model_config(config), 0)
    optimizer = make_optimizer(config)
    params = abstract(params, mesh)
    opt_state = abstract(jax.eval_shape(optimizer.init, params), mesh)
    batch = abstract_batch(mesh, config.batch_size, config.seq_len)
    return compile_train_step(make_train_step(graphdef, optimizer), mesh, params, opt_state, batch)


def test_data_parallel_step_gathers_nothing():
    program = compiled_step(make_mesh("data=8"), CONFIG).as_text()
    assert "all-reduce" in program
    assert not re.findall(r"all-gather|all-to-all|collective-permute", program)


def test_memory_of_a_long_sequence_falls_with_its_parts():
    config = TrainConfig(
        d_model=32, n_layer=2, d_state=8, seq_len=4096, batch_size=1, scan="sequential", remat=True
    )  # fmt: skip
    one, eight = (compiled_step(make_mesh(mesh), config).memory_analysis().temp_size_in_bytes for mesh in ("", "seq=8"))
    assert eight < one / 5


def beginning(mesh):
    """(graphdef, optimizer, parameters, moments, batch) of a run's first step on a mesh."""
    graphdef, params = build_model(model_config(CONFIG), 0, mesh)
    optimizer = make_optimizer(CONFIG)
    return graphdef, optimizer, params, init_optimizer(optimizer, params, mesh), batch_on(mesh)


def test_state_is_shared_out_and_stays_where_it_is():
    """FSDP: every matrix and both its moments are an eighth on each device, before a step and after it."""
    mesh = make_mesh("fsdp=8")
    graphdef, optimizer, params, opt_state, batch = beginning(mesh)
    step = compile_train_step(make_train_step(graphdef, optimizer), mesh, params, opt_state, batch)
    before = [leaf.sharding for leaf in jax.tree.leaves((params, opt_state))]
    matrices = [leaf for leaf in jax.tree.leaves((params, opt_state)) if leaf.ndim == 3 or leaf.shape == (256, 16)]
    assert len(matrices) == 3 * 7
    assert all(leaf.addressable_shards[0].data.size * 8 == leaf.size for leaf in matrices)
    after = step(params, opt_state, batch)[:2]
    assert [leaf.sharding for leaf in jax.tree.leaves(after)] == before


def test_accumulated_gradients_are_those_of_the_whole_batch():
    mesh = make_mesh("data=2")
    graphdef, optimizer, params, opt_state, batch = beginning(mesh)
    results = []
    for parts in (1, 4):
        copies = jax.tree.map(jnp.copy, (params, opt_state))
        step = make_train_step(graphdef, optimizer, accumulate=parts)
        results.append(whole(compile_train_step(step, mesh, params, opt_state, batch)(*copies, batch)[2]))
    assert results[0].keys() == results[1].keys()
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(results[1][name], results[0][name], rtol=1e-5)


def test_specifications():
    specification = partition(make_mesh("fsdp=2,tensor=4"))
    assert specification(("layers", "mixer", "out_proj", "kernel"), (3, 64, 32)) == P(None, "tensor", "fsdp")
    assert specification(("layers", "mixer", "in_proj", "kernel"), (3, 32, 128)) == P(None, "fsdp", "tensor")
    assert specification(("layers", "mixer", "A_log"), (3, 64, 16)) == P(None, "tensor", "fsdp")
    assert specification(("layers", "mixer", "dt_bias"), (3, 64)) == P(None, "tensor")
    assert specification(("layers", "norm", "scale"), (3, 32)) == P(None, None)
    assert specification(("embedding",), (256, 32)) == P("tensor", "fsdp")
    # What an axis does not divide stays whole.
    assert specification(("layers", "mixer", "x_proj", "kernel"), (3, 62, 35)) == P(None, "fsdp", None)
    tree = {"embedding": jax.ShapeDtypeStruct((256, 32), np.float32)}
    state = jax.eval_shape(make_optimizer(CONFIG).init, tree)
    specs = {leaf.spec for leaf in jax.tree.leaves(shardings(state, make_mesh("fsdp=2")))}
    assert specs == {P(), P("fsdp", None)}


def test_only_the_rows_of_this_process_are_read():
    """All devices are this process' own here: all rows are read, once."""
    asked = []

    def read(rows):
        asked.append(rows)
        return Batch(np.arange(32).reshape(4, 8), np.zeros((4, 8), int))

    batch = place_batch(make_mesh("data=2,seq=2"), (4, 8), read)
    assert asked == [slice(0, 4)]
    np.testing.assert_array_equal(batch.tokens, np.arange(32).reshape(4, 8))
    shard = next(s for s in batch.tokens.addressable_shards if s.index == (slice(2, 4), slice(4, 8)))
    np.testing.assert_array_equal(shard.data, [[20, 21, 22, 23], [28, 29, 30, 31]])


@pytest.mark.parametrize("text", ["data", "data=0", "model=2", "data=2,data=2", "data=two", "data=2;seq=2"])
def test_what_is_no_mesh(text):
    with pytest.raises(UsageError, match=re.escape(f"--mesh {text}: axes out of data, fsdp, seq, tensor")):
        parse_mesh(text)


def test_mesh_needs_its_devices():
    with pytest.raises(UsageError, match=r"--mesh data=3,seq=4: it takes 12 devices, and there are 8 \(cpu\)"):
        make_mesh("data=3,seq=4")


def test_everything_that_a_mesh_does_not_divide_is_named():
    sizes = {"batch_size": 6, "accumulate": 1, "seq_len": 8, "d_conv": 4, "d_inner": 30}
    problems = check_mesh("data=2,fsdp=2,seq=4,tensor=4", **sizes)
    assert [problem.split(":")[0] for problem in problems[:2]] == ["--batch-size 6", "--seq-len 8"]
    assert "tensor=4" in problems[2]
    assert check_mesh("data=2,seq=2", **sizes) == []
    (problem,) = check_mesh("", **sizes | {"accumulate": 4})
    assert problem == "--batch-size 6: a multiple of 1 times --accumulate 4 is wanted"
