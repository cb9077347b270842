"""One run: everything is wired here, and only here; run state and commits of its files are owned here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from hf_algorithms.checkpoints import Checkpoints, Ledger, Resumption
from hf_algorithms.checkpoints.program import Program
from hf_algorithms.config import Config, build_sections
from hf_algorithms.data import PromptDataset
from hf_algorithms.evaluation.validation import evaluate, evaluate_with_samples, measure_divergence
from hf_algorithms.models.adapters import export_trained, probe_sampler
from hf_algorithms.models.role_models import describe_generic_shapes
from hf_algorithms.models.sampler_adapters import describe_merging
from hf_algorithms.preflight.checks import check_run
from hf_algorithms.preflight.inputs import RunInputs
from hf_algorithms.preflight.machine import check_machine
from hf_algorithms.preflight.placement import compute_workload, describe_attention
from hf_algorithms.preflight.reward_functions import describe_logs
from hf_algorithms.preflight.store_room import describe_store
from hf_algorithms.report import leave_report
from hf_algorithms.rewards import TrainerState
from hf_algorithms.roles import Roles
from hf_algorithms.run.deadlines import evaluation_deadline, list_deadlines
from hf_algorithms.run.display import RunDisplay
from hf_algorithms.run.evaluations import RunEvaluations
from hf_algorithms.run.iteration import RunIteration
from hf_algorithms.run.phases import measure_phases
from hf_algorithms.run.process_tree import MemoryMeter
from hf_algorithms.run.restarts import Attempt, Restarts, run_with_restarts
from hf_algorithms.run.start import begin_run, check_inputs
from hf_algorithms.run.step_metrics import (
    average_metrics,
    describe_failures,
    describe_skipped,
    describe_unscorable,
    has_skipped_all,
)
from hf_algorithms.run.summary import RunSummary
from hf_algorithms.run.training_samples import collect_training_samples
from hf_algorithms.run.warm_start import warm_start
from hf_algorithms.run_directory import RunDirectory
from hf_algorithms.trackers import MetricsHook, prepare_tracking
from hf_algorithms.wiring import build_roles, build_sampling
from hf_controller import Executor, InProcessExecutor
from hf_protocols import MappingPlan

if TYPE_CHECKING:
    from hf_controller import BatchFuture
    from hf_engine import SamplingParams

__all__ = [
    "build_executor",
    "run_training",
]


def run_training(
    config: Config,
    directory: RunDirectory,
    *,
    plan: MappingPlan | None = None,
    search_path: Sequence[str] = (),
    on_metrics: MetricsHook | None = None,
    resume: Resumption | None = None,
) -> dict[str, Any]:
    """Warm start, algorithm and evaluations of one run; its files are left in `directory`.

    Args:
        plan: where the models go; None lets the mapper decide.
        search_path: folders where reward functions are looked for first.
        on_metrics: called with each iteration and its metrics; None takes the function of `run.on_metrics`.
        resume: the run goes on from there.

    Returns:
        The contents of `summary.json`.

    Raises:
        NonFiniteLossError: `model/` then holds the weights of the last evaluation.
        HybridFlowError: for any other error that a user can cause.
    """
    return run_with_restarts(
        _run_once, config, directory, plan=plan, search_path=search_path, on_metrics=on_metrics, resume=resume
    )


def _run_once(attempt: Attempt) -> dict[str, Any]:
    started_s = time.monotonic()
    config, directory, plan = attempt.config, attempt.directory, attempt.plan
    search_path, resume = attempt.search_path, attempt.resume
    on_metrics = config.run.on_metrics if attempt.on_metrics is None else attempt.on_metrics
    tracking = prepare_tracking(config.run.trackers, on_metrics, search_path=search_path)
    with TemporaryDirectory() as folder:
        fresh = Path(folder) / "initial_model"
        inputs, plan = check_run(config, fresh, plan=plan, search_path=search_path)
        check_machine(config, plan)
        check_inputs(config, directory)
        with (
            MemoryMeter() as memory,
            RunDisplay(config.run.iterations, started_s=started_s) as display,
            ExitStack() as stack,
        ):
            for note in (*describe_generic_shapes(inputs.models), *describe_merging(config, inputs.models)):
                display.note(note)
            logs = describe_logs(config, search_path=search_path)
            store = describe_store(config, plan, inputs, is_here=True)
            for line in (*logs, *inputs.describe_data(), *inputs.describe_draws(config), *store):
                display.note(line)
            limit = config.rollout.max_new_tokens
            if isinstance(data := inputs.pretraining, PromptDataset) and (cut := data.count_cut_answers(limit)):
                display.note(f"{data.source}: {cut} of {len(data)} answers are cut to rollout.max_new_tokens = {limit}")
            for line in resume.notes if resume is not None else ():
                display.note(f"warning: {line}. It is not used")
            display.phase("starting workers")
            executor = stack.enter_context(build_executor(config, plan))
            inputs, record = begin_run(config, directory, plan, inputs, fresh, search_path=search_path, resume=resume)
            stack.enter_context(tracking.follow(directory, display.note, sections=build_sections(config)))
            facts = {
                "algorithm": config.algorithm.name,
                "metric": config.reward.metric_name,
                "workload": compute_workload(config, prompt_tokens=inputs.train.max_prompt_tokens),
            }
            summary = RunSummary(
                attempt,
                executor,
                memory,
                command="train",
                facts=facts,
                plan=plan,
                shapes=describe_attention(config, {role: each.shape for role, each in inputs.models.items()}),
                note=display.note,
            )
            stack.enter_context(summary)
            roles = build_roles(executor, config, plan, inputs, search_path, failed=attempt.restarts.failed)
            if spare := inputs.model.num_spare_logits:
                display.note(f"{inputs.model.label}: {spare} logits are beyond its tokenizer's ids and have no text")
            evaluations = RunEvaluations(config, inputs, executor, roles, search_path)
            stack.enter_context(closing(evaluations))
            restarts = attempt.restarts
            run = _Run(config, directory, inputs, executor, roles, evaluations, display, summary, restarts)
            run.execute(resume, record)
        leave_report(directory.path, display.note)
    return summary.body


class _Run:
    """The state of a run: where it stands, and what was measured."""

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        inputs: RunInputs,
        executor: Executor,
        roles: Roles,
        evaluations: RunEvaluations,
        display: RunDisplay,
        summary: RunSummary,
        restarts: Restarts,
    ) -> None:
        self._config = config
        self._directory = directory
        self._inputs = inputs
        self._executor = executor
        self._roles = roles
        self._evaluations = evaluations
        self._display = display
        self._summary = summary
        self._restarts = restarts
        self._stop = restarts.stop
        self._validation = self._put_first_rows(inputs.validation)
        self._test = self._put_first_rows(inputs.test)
        self._metric = config.reward.metric_name
        self._state: dict[str, Any] = {}
        self._ledger = Ledger(directory)
        self._checkpoints = Checkpoints(config.run, directory, roles, summary, display.note)
        self._base = inputs.models[roles.having("generate_sequences").role].path
        self._failing: set[str] = set()
        self._busy_s = 0.0
        self._num_tokens = 0.0

    def execute(self, resume: Resumption | None, record: Callable[[], None]) -> None:
        """Runs all phases in order; if one fails, the results so far are on disk.

        Args:
            resume: a run that goes on.
            record: writes down its configuration, once the states have been loaded.
        """
        with closing(self._checkpoints):
            if resume is None or resume.program is None:
                self._start(resume, record)
            else:
                self._continue(resume, resume.program)
                record()
            self._display.phase(self._config.algorithm.name)
            self._summary.note_start(self._display.phases)
            first, last = self._summary["iterations"] + 1, self._config.run.iterations
            is_stopped = self._stop.iterate(self._iterate, first, last)
            self._checkpoints.finish()
            if is_stopped:
                self._summary.interrupt()
                return
            self._display.phase("evaluating the result")
            if first > last:  # it resumed with nothing left to do: `model/` may be of any iteration
                self._commit_model(last)
            self._summary["score_after"] = self._evaluate("test", self._config.run.iterations)
            with self._executor.deadline(evaluation_deadline(self._config)):
                divergence = measure_divergence(self._roles, self._test, self._sampling(0))
            if divergence is not None:
                self._summary["kl_to_reference"] = divergence

    def _start(self, resume: Resumption | None, record: Callable[[], None]) -> None:
        """Makes the warm start, or the rest of it, the probe and the first evaluation."""
        self._note_progress(0)
        self._warm_start(resume, record)
        probe_sampler(self._config, self._roles, self._validation, self._sampling(0))
        self._display.phase("evaluating the starting point")
        self._commit_model(0)
        self._summary["score_before"] = self._evaluate("test", 0)
        self._continue_draws(None)
        if self._config.warm_start.max_steps:
            self._end_iteration(self._checkpoints, 0, is_last=True)

    def _continue(self, resume: Resumption, program: Program) -> None:
        """Takes over what the last commit holds."""
        self._display.phase(f"resuming after iteration {program.iteration}")
        if self._config.warm_start.max_steps:
            self._load_warm_model()
        self._state.update(program.state)
        self._busy_s, self._num_tokens = program.totals["busy_s"], program.totals["tokens"]
        self._ledger = Ledger(self._directory, program.ledger)
        self._continue_draws(program)
        self._note_progress(program.iteration)
        self._summary.restore(program)
        self._checkpoints.restore(program)
        resume.load(self._roles)

    def _continue_draws(self, program: Program | None) -> None:
        rollout = self._config.rollout
        self._restarts.continue_draws(
            self._ledger,
            self._inputs.train.order,
            program,
            batch_size=rollout.batch_size,
            samples=rollout.samples_per_prompt,
            seed=self._config.run.seed,
        )

    def _warm_start(self, resume: Resumption | None, record: Callable[[], None]) -> None:
        """Supervised training of the policy; every role that starts from the same weights then gets the result.

        A role whose own path the configuration gives keeps its weights.
        """
        config = self._config.warm_start
        if config.max_steps == 0:
            record()
            return
        self._display.phase("warm start")
        limit = self._config.rollout.max_new_tokens
        if cut := self._inputs.train.count_cut_answers(limit):
            self._display.note(f"{cut} of {len(self._inputs.train)} answers are cut to rollout.max_new_tokens={limit}")
        # constant: a schedule is for the iterations, before which every role loads the warm model
        has_schedule = self._config.training.learning_rate_schedule != "constant"
        options = {"constant": True} if has_schedule else {}
        note = self._display.note
        checkpoints = Checkpoints(
            self._config.run, self._directory, self._roles, self._summary, note, of_warm_start=True
        )
        with closing(checkpoints):
            done = resume.load_warm_start(self._roles) if resume is not None else 0
            record()
            if done:
                note(f"the warm start goes on after step {done}")
            self._roles.having("set_learning_rate").set_learning_rate(config.learning_rate, **options).result()
            self._summary["warm_start_steps"] = warm_start(
                self._roles,
                self._supervised_batches(done),
                self._evaluate_warm_start,
                config,
                metric=self._metric,
                note=note,
                first=done + 1,
                end_step=partial(self._end_iteration, checkpoints),
            )
            checkpoints.finish()
        with self._directory.replacing("warm_model") as folder:  # float32: roles load the policy's own weights
            self._roles.having("generate_sequences").export_model(str(folder), dtype="float32").result()
            self._directory.write_files(folder, self._inputs.exported_files())
        self._load_warm_model()

    def _load_warm_model(self) -> None:
        warm = self._directory.path / "warm_model"
        models = self._inputs.models
        policy = self._roles.having("generate_sequences").role
        for role, group in self._roles.groups.items():
            is_given = self._config.role(role).path is not None and role != policy
            if role in models and models[role].path == models[policy].path and not is_given:
                group.load_model(str(warm)).result()
        self._base = str(warm.resolve())

    def _take_step(self, iteration: int) -> tuple[dict[str, float], Sequence[BatchFuture]]:
        """Returns the metrics of one step of the recipe, and the batches that it showed."""
        config = self._config
        current = RunIteration(
            config,
            self._inputs,
            self._executor,
            self._ledger,
            self._state,
            iteration,
            self._sampling(iteration + self._restarts.skipped_draws),
            self._count_drawn(iteration - 1),
        )
        prompts, context = current.first(), current.context()
        with self._executor.trace.label(iteration=iteration):
            futures = [
                *config.recipe.run_step(self._roles, prompts, config.algorithm, context),
                *(group.drain_metrics() for group in self._roles.groups.values() if "drain_metrics" in group.methods),
            ]
            self._ledger.follow()
            return average_metrics(config.recipe.name, futures), current.shown

    def _iterate(self, iteration: int) -> None:
        """One step of the recipe, its metrics, and an evaluation every now and then."""
        config = self._config
        start_s = time.perf_counter()
        metrics, batches = self._take_step(iteration)
        self._ledger.settle(is_skipped=has_skipped_all(metrics))
        self._note_progress(iteration)
        elapsed_s = time.perf_counter() - start_s
        is_last = iteration == config.run.iterations
        is_evaluated = is_last or iteration % config.run.eval_every == 0
        if is_evaluated:
            self._write_samples(iteration, batches)
        del batches  # they leave the object store before those of evaluations come
        if is_evaluated:
            metrics[f"eval/validation/{self._metric}"] = self._evaluate("validation", iteration)
            self._commit_model(iteration)
        found, shown = self._evaluations.evaluate_due(iteration, is_last=is_last)
        metrics |= found
        self._directory.append_samples(iteration, shown)
        samples = config.rollout.batch_size * config.rollout.samples_per_prompt
        tokens = samples * metrics.get("response/tokens", 0.0)
        self._busy_s += elapsed_s
        self._num_tokens += tokens
        metrics["perf/samples_per_s"] = samples / elapsed_s
        if tokens:  # a recipe of one's own may not count them
            metrics["perf/tokens_per_s"] = tokens / elapsed_s
        metrics["time/iteration_s"] = elapsed_s
        metrics |= measure_phases(self._executor.trace.drain(), self._roles.groups, iteration)
        metrics |= self._checkpoints.measure() | self._restarts.measure()
        self._summary.update({"iterations": iteration, "ledger": self._ledger.counts})
        self._summary["samples_per_s"] = samples * iteration / self._busy_s
        if self._num_tokens:
            self._summary["tokens_per_s"] = self._num_tokens / self._busy_s
        if "constraint/infeasible" in metrics:
            self._summary["infeasible"] = bool(metrics["constraint/infeasible"])
        if "reward/unscorable" in metrics and "reward/mean" not in metrics:
            self._display.note(describe_unscorable(iteration, metrics))
        failures = describe_failures(iteration, metrics)
        for line in (failures[name] for name in failures.keys() - self._failing):  # said once for each function
            self._display.note(line)
        self._failing |= failures.keys()
        for line in describe_skipped(iteration, metrics):
            self._display.note(line)
        self._directory.append_metrics({"iteration": iteration, **metrics})
        self._display.iteration(iteration, metrics)
        score = metrics.get(f"eval/validation/{self._metric}")
        self._end_iteration(self._checkpoints, iteration, is_last=is_last or self._stop.decide(), score=score)

    def _end_iteration(
        self, checkpoints: Checkpoints, iteration: int, *, is_last: bool = False, score: float | None = None
    ) -> None:
        """Commits what there is after an iteration, or after a step of the warm start, if it is time."""
        checkpoints.end_iteration(
            iteration,
            is_last=is_last,
            score=score,
            state=self._state,
            totals={"busy_s": self._busy_s, "tokens": self._num_tokens, "wall_s": self._summary.wall_s},
            ledger=self._ledger,
            data={"rows_drawn": self._count_drawn(iteration), "rows": len(self._inputs.train)},
            skipped_draws=self._restarts.skipped_draws,
        )

    def _count_drawn(self, iteration: int) -> int:
        """Prompts that the run has drawn after an iteration, without refills."""
        return self._restarts.count_drawn(iteration, self._config.rollout.batch_size)

    def _write_samples(self, iteration: int, shown: Sequence[BatchFuture]) -> None:
        """Writes down some responses of the last batch that the step showed."""
        if shown:
            size, tokenizer = self._config.rollout.samples_per_prompt, self._inputs.model.tokenizer
            stop_ids = self._inputs.stop_ids
            rows = collect_training_samples(shown[-1], self._roles, tokenizer, group_size=size, stop_ids=stop_ids)
            self._directory.append_samples(iteration, rows)

    def _note_progress(self, iteration: int) -> None:
        """Reports the progress of the run after this many iterations to workers that ask for it."""
        config, most = self._config, self._config.count_updates()
        state = TrainerState(
            global_step=most // config.run.iterations * iteration,
            max_steps=most,
            epoch=self._count_drawn(iteration) / len(self._inputs.train),
            iteration=iteration,
        )
        for group in self._roles.groups.values():
            if "note_progress" in group.methods:
                group.note_progress(state)

    def _evaluate_warm_start(self) -> float:
        with self._executor.deadline(evaluation_deadline(self._config)):
            return evaluate(self._roles, self._validation, self._sampling(0))

    def _evaluate(self, name: Literal["validation", "test"], iteration: int) -> float:
        """The metric of a set; some of its responses are written down."""
        prompts = self._validation if name == "validation" else self._test
        with self._executor.deadline(evaluation_deadline(self._config)):
            score, samples = evaluate_with_samples(self._roles, prompts, self._sampling(0))
        self._directory.append_samples(iteration, [{"set": name, **each} for each in samples])
        return score

    def _supervised_batches(self, step: int) -> Iterator[BatchFuture]:
        """Batches of the warm start after so many steps."""
        data, config = self._inputs.train, self._config
        while True:
            drawn = data.order.draw(config.warm_start.batch_size, iteration=step, seed=config.run.seed + 1)
            rows = [row for _, row in drawn]
            yield self._executor.put(data.supervised(rows, max_response_tokens=config.rollout.max_new_tokens))
            step += 1

    def _put_first_rows(self, data: PromptDataset) -> BatchFuture:
        return self._executor.put(data.prompts(range(min(len(data), self._config.data.max_eval_rows))))

    def _sampling(self, step: int) -> SamplingParams:
        return build_sampling(self._config, stop_ids=self._inputs.stop_ids, step=step)

    def _commit_model(self, iteration: int) -> None:
        """The weights that were just evaluated are the last good state."""
        with self._directory.replacing("model") as folder:
            policy = self._roles.having("generate_sequences")
            for written in export_trained(policy, self._config, folder, base=self._base):
                self._directory.write_files(written, self._inputs.exported_files())
        self._summary["model_iteration"] = iteration


def build_executor(config: Config, plan: MappingPlan) -> Executor:
    """Returns the executor that `run.executor` names, with a slot for each of the plan's."""
    if config.run.executor == "in_process":
        executor = InProcessExecutor()
        executor.call_timeout_s = config.cluster.call_timeout_s
        return executor
    from hf_controller import RayExecutor  # Ray takes a second to import, and need not be installed

    slots = sum(pool.num_slots for pool in plan.pools)
    deadlines = list_deadlines(config)
    return RayExecutor(
        num_cpus=slots,
        address=config.cluster.address,
        object_store_bytes=config.cluster.object_store_bytes,
        call_timeout_s=config.cluster.call_timeout_s,
        start_timeout_s=deadlines["__init__"].seconds,
        deadlines=deadlines,
    )
