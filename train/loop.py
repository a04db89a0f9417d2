"""The run: whatever reads, writes or waits happens here; the mathematics is in `step.py`."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mamba_jax import MambaConfig, generate
from train.banner import banner
from train.checkpoint import Checkpoints, check_same_model, last_good
from train.config import PROGRAM, TrainConfig, write_toml
from train.data import Batch, load_corpus, training_batch, validation_batches
from train.errors import TrainingStopped
from train.folder import new_folder
from train.loss import bigram_bits_per_byte, bits_per_byte
from train.metrics import Metrics, draw_loss, read_metrics
from train.optim import learning_rate, make_optimizer
from train.report import Report, compared, duration
from train.resume import Found, checkpoint_folder, find_checkpoint, set_aside
from train.signals import Signals
from train.start import starting_point
from train.step import Params, build_model, count_parameters, make_eval_step, make_train_step, model_graph

# How a model is computed may change when a run is resumed; what it is may not.
_NOT_IDENTITY = ("scan", "remat", "remat_policy")


def train(config: TrainConfig, report: Report, kind: type[Run]) -> None:
    """Train as the settings say, to the end or until something stops it, and report on it.

    Args:
        config: the settings.
        report: where the run says what it does.
        kind: `Run` for a language model, or a subclass that learns something else.

    Raises:
        UsageError: the settings cannot be met; nothing has been written then.
        TrainingStopped: a loss that will not do, a checkpoint that cannot be read or written, or an interruption.
    """
    with Signals() as signals:
        found = Found(None, {})
        if config.resume and config.run_dir is not None:
            with report.wait("checking the checkpoints"):
                found = find_checkpoint(Path(config.run_dir))
            step = None if found.step is None else checkpoint_folder(Path(config.run_dir), found.step)
            config, architecture, params = starting_point(config, step)
        else:
            config, architecture, params = starting_point(config)
        corpus = kind.load(config, report)
        if config.resume and config.run_dir is not None:
            run_dir = Path(config.run_dir)
        else:
            name = "bytes" if config.task == "lm" else config.task
            run_dir = new_folder(config.run_dir, name if config.config is None else Path(config.config).stem)
        checkpoints = Checkpoints(run_dir, config.keep_checkpoints, config.keep_every)
        try:
            run = kind(config, corpus, run_dir, checkpoints, report, signals)
            run.prepare(architecture, params, found)
            if run.step >= config.steps:
                report.line(f"{run_dir} is at step {run.step} of {config.steps} already: more --steps would go on")
            else:
                run.go()
        finally:
            checkpoints.close()


class Run:
    """One call of the command, with everything that changes on its way: after `step` steps it holds what comes next."""

    def __init__(
        self,
        config: TrainConfig,
        corpus: Any,
        run_dir: Path,
        checkpoints: Checkpoints,
        report: Report,
        signals: Signals,
    ) -> None:
        self.config, self.corpus, self.run_dir = config, corpus, run_dir
        self.checkpoints, self.report, self.signals = checkpoints, report, signals
        self.step = self.saved_step = 0
        self.step_s = self.validation_s = 0.0  # how long one takes, for the ETA

    @classmethod
    def load(cls, config: TrainConfig, report: Report) -> Any:
        """What is to be learned."""
        with report.wait("reading the text"):
            return load_corpus(config.data, config.val_fraction, config.seq_len)

    def prepare(self, architecture: MambaConfig, params: Params | None, found: Found) -> None:
        """Parameters and moments: `params` or new ones, or those of the checkpoint that the run is resumed from."""
        self.found = found
        fields = dataclasses.asdict(architecture)
        model = {name: value for name, value in fields.items() if name not in _NOT_IDENTITY}
        self.meta = {"model": model, "text_sha256": self.corpus.fingerprint()}
        self.optimizer = make_optimizer(self.config)
        with self.report.wait("making the parameters"):
            if params is None:
                self.graphdef, self.params = build_model(architecture, self.config.seed)
            else:
                self.graphdef, self.params = model_graph(architecture), params
            self.opt_state = jax.jit(self.optimizer.init)(self.params)
        self.key = jax.random.key_data(jax.random.key(self.config.seed))
        if self.config.resume:
            self._restore()

    def go(self) -> None:
        """From here to the last step, then the sample, the plot and the summary."""
        config, start = self.config, time.perf_counter()
        self.metrics = Metrics(self.run_dir / "metrics.jsonl", self.step)
        self.report.table(banner(config, self.corpus, self.run_dir, count_parameters(self.params)))
        first = self.step
        try:
            self._compile()
            # Only now: settings that cannot run must not take the place of those that did.
            write_toml(self.run_dir / "config.toml", config)
            self._set_damaged_aside()
            with self.report.progress(first, config.steps), self.signals.held():
                self._steps()
        except KeyboardInterrupt as error:
            message = f"Interrupted after step {self.step}.\n{self._last_good()}"
            raise TrainingStopped(message, getattr(error, "exit_code", 130)) from None
        finally:
            self.metrics.close()
        self._show_sample()
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
        if meta["text_sha256"] != self.meta["text_sha256"]:
            self.report.line("the training text is not the one that this run began with", style="yellow")
        with self.report.wait(f"loading the checkpoint of step {step}"):
            state = self.checkpoints.restore(step, self._state())
        self.params, self.opt_state, self.key = state["params"], state["opt_state"], state["key"]
        self.step = self.saved_step = step

    def _state(self) -> dict[str, Any]:
        """All arrays that the steps to come depend on; where the data stands follows from the step."""
        return {"params": self.params, "opt_state": self.opt_state, "key": self.key}

    def _compile(self) -> None:
        batch = self._batch(self.step + 1)
        train_step = make_train_step(self.graphdef, self.optimizer)
        with self.report.wait(f"step {self.step + 1}: compiling the training step, once"):
            self.train_step = train_step.lower(self.params, self.opt_state, batch).compile()
        self._compile_validation(batch)
        # All rates at once: a schedule called outside a compiled program costs many small ones.
        self.rates = np.asarray(jax.jit(learning_rate(self.config))(jnp.arange(self.config.steps)))

    def _compile_validation(self, batch: Batch) -> None:
        with self.report.wait("compiling the validation step, and counting byte pairs for the bigram model"):
            self.eval_step = make_eval_step(self.graphdef).lower(self.params, batch).compile()
            self.bigram_bpb = bigram_bits_per_byte(self.corpus.train, self._validation_batches())

    def _set_damaged_aside(self) -> None:
        """Only once the run goes on from an earlier checkpoint: these steps will be saved anew."""
        for step in self.found.damaged:
            path = set_aside(checkpoint_folder(self.run_dir, step))
            self.report.line(f"the damaged checkpoint of step {step} is now {path}", style="yellow")
        self.checkpoints.reload()

    def _steps(self) -> None:
        config = self.config
        skipped = int(self.opt_state.skipped)
        batch = self._batch(self.step + 1)
        for step in range(self.step + 1, config.steps + 1):
            start = time.perf_counter()
            self.params, self.opt_state, metrics = self.train_step(self.params, self.opt_state, batch)
            # The device works while the next batch is made; reading the loss waits for it.
            batch = self._batch(step + 1)
            loss, grad_norm = float(metrics["loss"]), float(metrics["grad_norm"])
            self._log_step(step, loss, grad_norm, skipped, time.perf_counter() - start)
            if int(metrics["skipped"]) > skipped:
                self._bad_loss(step, loss, grad_norm)
                skipped += 1
            self.step = step
            last = step == config.steps
            if last or step % config.eval_every == 0:
                self._validate()
            if last or step % config.checkpoint_every == 0:
                self._save()
            self.checkpoints.check()
            if self.signals.received is not None and not last:
                self._save()
                with self.report.wait(f"{self.signals.received.name}: saving step {step}"):
                    self.checkpoints.latest_step()
                message = f"{self.signals.received.name} after step {step}; everything up to it is saved."
                raise TrainingStopped(f"{message}\n{self._last_good()}", self.signals.received.exit_code)

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
        config = self.config
        record = {
            "step": step,
            "loss": loss,
            **self._scores(loss),
            "lr": float(self.rates[step - 1 - skipped]),
            "grad_norm": grad_norm,
            "step_ms": 1000 * seconds,
            "tokens_per_s": config.batch_size * config.seq_len / seconds,
        }
        self.metrics.write(record)
        self.step_s = seconds if self.step_s == 0 else 0.9 * self.step_s + 0.1 * seconds
        validations = math.ceil(config.steps / config.eval_every) - (step - 1) // config.eval_every
        eta_s = (config.steps - step) * self.step_s + validations * self.validation_s
        printed = step == 1 or step % config.log_every == 0 or step == config.steps
        self.report.step(record, config.steps, eta_s, self._shown(record), printed=printed)

    def _scores(self, loss: float) -> dict[str, float]:
        """What a step's record says beside its loss in nats."""
        return {"bpb": bits_per_byte(loss)}

    def _shown(self, record: dict[str, Any]) -> str:
        """What a step's line says beside its loss."""
        return f"bpb {record['bpb']:.3f}"

    def _validate(self) -> None:
        start = time.perf_counter()
        record = {"step": self.step, **self._validation_scores()}
        self.metrics.write(record)
        self.last_validation = record
        self.validation_s = time.perf_counter() - start
        self._report_validation()

    def _validation_scores(self) -> dict[str, float]:
        losses = [float(self.eval_step(self.params, batch)) for batch in self._validation_batches()]
        return {"val_bpb": bits_per_byte(float(np.mean(losses))), "bigram_bpb": self.bigram_bpb}

    def _report_validation(self) -> None:
        self.report.validation(self.last_validation, self.validation_s)

    def _draw(self, records: list[dict[str, Any]], path: Path, title: str) -> None:
        draw_loss(records, path, title)

    def _show_sample(self) -> None:
        config = self.config
        if config.sample_tokens == 0:
            return
        # An empty prompt has nothing to go on from; a line's end is the most neutral beginning.
        prompt = np.frombuffer(config.sample_prompt.encode() or b"\n", np.uint8)
        with self.report.wait(
            f"writing a sample of {config.sample_tokens} bytes, at temperature {config.temperature:g}"
        ):
            key = jax.random.fold_in(jax.random.wrap_key_data(self.key), self.step)
            model = nnx.merge(self.graphdef, self.params)
            tokens = generate(model, prompt[None], config.sample_tokens, temperature=config.temperature, key=key)
        text = np.asarray(tokens[0]).astype(np.uint8).tobytes()
        (self.run_dir / "sample.txt").write_bytes(text)
        self.report.sample(text)

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

    def _score(self) -> str:
        """How the model stands at the end, in words."""
        val_bpb, bigram_bpb = self.last_validation["val_bpb"], self.last_validation["bigram_bpb"]
        return f"{val_bpb:.3f} bits per byte on held-out text, {compared(val_bpb, bigram_bpb)}"

    def _last_good(self) -> str:
        return last_good(self.run_dir, self.checkpoints.latest_step())

    def _batch(self, step: int) -> Batch:
        config = self.config
        return training_batch(
            self.corpus.train, seed=config.seed, step=step, batch_size=config.batch_size, seq_len=config.seq_len
        )

    def _validation_batches(self) -> list[Batch]:
        config = self.config
        return list(
            validation_batches(
                self.corpus.validation,
                n_batches=config.eval_batches,
                batch_size=config.batch_size,
                seq_len=config.seq_len,
            )
        )
