"""The run, whatever it learns: what reads, writes or waits happens here; the mathematics is in `step.py`."""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mamba_jax import MambaConfig
from train.banner import banner
from train.checkpoint import Checkpoints, check_same_model, last_good
from train.config import PROGRAM, TrainConfig, write_toml
from train.data import ALL, Batch, take_rows
from train.devices import agreed, anywhere, is_first_process
from train.errors import TrainingStopped
from train.flops import training_flops
from train.metrics import read_metrics
from train.optim import learning_rate, make_optimizer
from train.profile import Profile, profiled_steps
from train.report import Report, duration
from train.resume import Found, checkpoint_folder, set_aside
from train.sharding import place_batch
from train.signals import Signals
from train.step import (
    Params,
    build_model,
    compile_train_step,
    count_parameters,
    init_optimizer,
    make_train_step,
    model_graph,
)
from train.watch import Watch

# How a model is computed may change when a run is resumed; what it is may not.
_NOT_IDENTITY = ("scan", "remat", "remat_policy")


class Run:
    """One call of the command, with everything that changes on its way: after `step` steps it holds what comes next."""

    eval_step: Any  # (parameters, batch) -> what a validation is made of

    def __init__(
        self,
        config: TrainConfig,
        mesh: Mesh,
        corpus: Any,
        run_dir: Path,
        checkpoints: Checkpoints,
        report: Report,
        signals: Signals,
    ) -> None:
        self.config, self.mesh, self.corpus, self.run_dir = config, mesh, corpus, run_dir
        self.checkpoints, self.report, self.signals = checkpoints, report, signals
        self.profile = Profile(profiled_steps(config.profile), run_dir / "profile")
        self.step = self.saved_step = 0

    @classmethod
    def load(cls, config: TrainConfig, report: Report) -> Any:
        """What is to be learned.

        Raises:
            UsageError: the settings do not give it.
        """
        raise NotImplementedError

    def prepare(self, architecture: MambaConfig, params: Params | None, found: Found) -> None:
        """Parameters and moments: `params` or new ones, or those of the checkpoint that the run is resumed from."""
        self.found = found
        fields = dataclasses.asdict(architecture)
        model = {name: value for name, value in fields.items() if name not in _NOT_IDENTITY}
        self.meta = {"model": model, **self.corpus.identity()}
        self.optimizer = make_optimizer(self.config)
        with self.report.wait("making the parameters"):
            if params is None:
                self.graphdef, self.params = build_model(architecture, self.config.seed, self.mesh)
            else:
                self.graphdef, self.params = model_graph(architecture), params
            self.opt_state = init_optimizer(self.optimizer, self.params, self.mesh)
        self.flops = training_flops(architecture, self.params, self.config.batch_size * self.config.seq_len)
        key = np.asarray(jax.random.key_data(jax.random.key(self.config.seed)))
        self.key = jax.device_put(key, NamedSharding(self.mesh, PartitionSpec()))
        if self.config.resume:
            self._restore()

    def go(self) -> None:
        """From here to the last step, then the sample, the plot and the summary."""
        config, start = self.config, time.perf_counter()
        self.watch = Watch(config, self.flops, self.run_dir, self.step, self.report)
        self.report.table(banner(config, self.mesh, self.corpus, self.run_dir, count_parameters(self.params)))
        first = self.step
        try:
            self._compile()
            # Only now: settings that cannot run must not take the place of those that did.
            if is_first_process():
                write_toml(self.run_dir / "config.toml", config)
                self._write_beside()
            self._set_damaged_aside()
            with self.report.progress(first, config.steps), self.signals.held():
                self._steps()
        except KeyboardInterrupt as error:
            message = f"Interrupted after step {self.step}.\n{self._last_good()}"
            raise TrainingStopped(message, getattr(error, "exit_code", 130)) from None
        finally:
            self.profile.close()
            self.watch.close()
        self._show_sample()
        if is_first_process():
            with self.report.wait("drawing loss.png"):
                title = f"{self.corpus.name}, {count_parameters(self.params):,} parameters"
                self._draw(read_metrics(self.run_dir / "metrics.jsonl"), self.run_dir / "loss.png", title)
        with self.report.wait("finishing the last checkpoint"):
            self.checkpoints.latest_step()
        self._summarise(self.step - first, time.perf_counter() - start)

    def _restore(self) -> None:
        step = self.found.step
        for damaged, damage in self.found.damaged.items():
            self.report.line(f"the checkpoint of step {damaged} is damaged: {damage}; going back", style="yellow")
        if step is None:
            self.report.line(f"{self.run_dir} has no checkpoint yet: beginning at step 0", style="yellow")
            return
        meta = self.checkpoints.meta(step)
        check_same_model(meta["model"], self.meta["model"], self.run_dir)
        if not self.corpus.is_the_one(meta):
            self.report.line("the training text is not the one that this run began with", style="yellow")
        with self.report.wait(f"loading the checkpoint of step {step}"):
            state = self.checkpoints.restore(step, self._state())
        self.params, self.opt_state, self.key = state["params"], state["opt_state"], state["key"]
        self.step = self.saved_step = step

    def _state(self) -> dict[str, Any]:
        """All arrays that the steps to come depend on; where the data stands follows from the step."""
        return {"params": self.params, "opt_state": self.opt_state, "key": self.key}

    def _compile(self) -> None:
        batch = self._placed_batch(self.step + 1)
        train_step = make_train_step(self.graphdef, self.optimizer, accumulate=self.config.accumulate)
        with self.report.wait(f"step {self.step + 1}: compiling the training step, once"):
            self.train_step = compile_train_step(train_step, self.mesh, self.params, self.opt_state, batch)
        self._compile_validation(batch)
        # All rates at once: a schedule called outside a compiled program costs many small ones.
        self.rates = np.asarray(jax.jit(learning_rate(self.config))(jnp.arange(self.config.steps)))

    def _set_damaged_aside(self) -> None:
        """Only once the run goes on from an earlier checkpoint: these steps will be saved anew."""
        for step in self.found.damaged:
            path = agreed(functools.partial(set_aside, checkpoint_folder(self.run_dir, step)))
            self.report.line(f"the damaged checkpoint of step {step} is now {path}", style="yellow")
        self.checkpoints.reload()

    def _steps(self) -> None:
        config = self.config
        skipped = int(self.opt_state.skipped)
        batch = self._placed_batch(self.step + 1)
        for step in range(self.step + 1, config.steps + 1):
            self.profile.before(step)
            start = time.perf_counter()
            self.params, self.opt_state, metrics = self.train_step(self.params, self.opt_state, batch)
            # The device works while the next batch is made; reading the loss waits for it.
            batch, problem = self._next_batch(step)
            loss, grad_norm = float(metrics["loss"]), float(metrics["grad_norm"])
            self._log_step(step, loss, grad_norm, skipped, time.perf_counter() - start)
            if int(metrics["skipped"]) > skipped:
                self._bad_loss(step, loss, grad_norm)
                skipped += 1
            self.step = step
            last = step == config.steps
            if last or step % config.eval_every == 0:
                problem = self._validate() or problem
            if last or step % config.checkpoint_every == 0:
                self._save()
            self.checkpoints.check()
            if (folder := self.profile.after(step)) is not None:
                self.report.line(f"the profile is in {folder}")
            if self.signals.received is not None and not last:
                name = self.signals.received.name
                problem = TrainingStopped(f"{name} after step {step}.", self.signals.received.exit_code)
            if anywhere(problem is not None):
                self._save_and_stop(problem or TrainingStopped(f"Another process ended the run after step {step}."))

    def _next_batch(self, step: int) -> tuple[Batch | None, TrainingStopped | None]:
        """The batch after this step, unless it is the last; or why there is none."""
        try:
            return (self._placed_batch(step + 1) if step < self.config.steps else None), None
        except TrainingStopped as problem:
            return None, problem

    def _save_and_stop(self, problem: TrainingStopped) -> None:
        """End the run with what it has learned so far on disk."""
        self._save()
        with self.report.wait(f"saving step {self.step}"):
            self.checkpoints.latest_step()
        raise TrainingStopped(f"{problem} Everything up to here is saved.\n{self._last_good()}", problem.exit_code)

    def _bad_loss(self, step: int, loss: float, grad_norm: float) -> None:
        """A step that the optimizer has left out."""
        what = f"At step {step} the loss is {loss:.6g} and the gradient's norm {grad_norm:.6g}"
        if self.config.on_bad_loss == "stop":
            raise TrainingStopped(f"{what}.\n{self._last_good()}\nA lower --lr may help; so may --on-bad-loss skip.")
        self.report.line(f"{what}: left out", style="yellow")

    def _save(self) -> None:
        if self.step != self.saved_step:
            self.checkpoints.save(self.step, self._state(), {**self.meta, "step": self.step})
            self.saved_step = self.step

    def _log_step(self, step: int, loss: float, grad_norm: float, skipped: int, seconds: float) -> None:
        scores = self._scores(loss)
        # Steps that were left out do not count for the schedule.
        record = {
            "step": step,
            "loss": loss,
            **scores,
            "lr": float(self.rates[step - 1 - skipped]),
            "grad_norm": grad_norm,
        }
        self.watch.step(record, self._shown(scores), seconds)

    def _validate(self) -> TrainingStopped | None:
        """Score what is held out; or why it cannot be read."""
        start = time.perf_counter()
        try:
            scores = self._validation_scores()
        except TrainingStopped as problem:
            return problem
        self.last_validation = {"step": self.step, **scores}
        self.validation_s = time.perf_counter() - start
        self.watch.validation(self.last_validation, self.validation_s)
        self._report_validation()
        return None

    def _summarise(self, n_steps: int, seconds: float) -> None:
        tokens = n_steps * self.config.batch_size * self.config.seq_len
        self.report.table(
            {
                "trained": f"{n_steps:,} steps, {tokens:,} tokens; {duration(seconds)} with compiling and validation",
                "score": self._score(),
                "files": f"{self.run_dir}: {', '.join(path.name for path in sorted(self.run_dir.iterdir()))}",
                "go on": f"{PROGRAM} --resume --run-dir {self.run_dir} --steps {2 * self.step}",
            }
        )

    def _last_good(self) -> str:
        return last_good(self.run_dir, self.checkpoints.latest_step())

    def _placed_batch(self, step: int) -> Batch:
        """The batch of a step on the devices of the mesh; each process reads its own rows alone."""
        shape = (self.config.batch_size, self.config.seq_len)
        return place_batch(self.mesh, shape, functools.partial(self._batch, step))

    def _evaluate(self, batch: Batch) -> Any:
        """The validation step's results for a batch that every process has whole."""
        return self.eval_step(self.params, self._placed(batch))

    def _placed(self, batch: Batch) -> Batch:
        return place_batch(self.mesh, batch.tokens.shape, functools.partial(take_rows, batch))

    # What is learned decides the rest.

    def _compile_validation(self, batch: Batch) -> None:
        """Make `eval_step`, for batches like this one or of the kind's own."""
        raise NotImplementedError

    def _batch(self, step: int, rows: slice = ALL) -> Batch:
        """Rows of the batch of a step."""
        raise NotImplementedError

    def _validation_scores(self) -> dict[str, float]:
        """What a validation's record says."""
        raise NotImplementedError

    def _report_validation(self) -> None:
        """Say how `last_validation` stands."""
        raise NotImplementedError

    def _draw(self, records: list[dict[str, Any]], path: Path, title: str) -> None:
        """Draw the run's metrics into a PNG."""
        raise NotImplementedError

    def _score(self) -> str:
        """How the model stands at the end, in words."""
        raise NotImplementedError

    def _scores(self, loss: float) -> dict[str, float]:
        """What a step's record says beside its loss in nats."""
        return {}

    def _shown(self, scores: dict[str, float]) -> str:
        """What a step's line says beside its loss."""
        raise NotImplementedError

    def _write_beside(self) -> None:
        """What else belongs into the run's folder."""

    def _show_sample(self) -> None:
        """Show at the end what the model makes, if it can be shown."""
