"""Runs of supervised recipes: rows as they are, an update on each batch, and evaluations on held-out rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hf_algorithms.checkpoints import Checkpoints, Ledger, Resumption
from hf_algorithms.config import Config, build_sections
from hf_algorithms.data import Row
from hf_algorithms.models.adapters import MERGED_MODELS, check_adapters, export_trained, merge_given_adapters
from hf_algorithms.models.exporting import state_padding
from hf_algorithms.models.initial_model import build_initial_model
from hf_algorithms.models.role_models import find_role_models, list_main_backends
from hf_algorithms.preflight.inputs import DATA_SETS, ModelInputs, build_turn_format
from hf_algorithms.preflight.machine import check_machine
from hf_algorithms.preflight.placement import (
    check_plan,
    check_train_backends,
    compute_workload,
    describe_attention,
    plan_placement,
)
from hf_algorithms.preflight.store_room import describe_supervised_store
from hf_algorithms.recipes import StepContext, SupervisedDataset, SupervisedRecipe, find_command
from hf_algorithms.report import leave_report
from hf_algorithms.run.deadlines import evaluation_deadline
from hf_algorithms.run.display import RunDisplay
from hf_algorithms.run.evaluations import RunEvaluations
from hf_algorithms.run.loop import build_executor
from hf_algorithms.run.phases import measure_phases
from hf_algorithms.run.process_tree import MemoryMeter
from hf_algorithms.run.restarts import Attempt, Restarts, run_with_restarts
from hf_algorithms.run.start import begin_run, check_inputs
from hf_algorithms.run.step_metrics import average_metrics, describe_skipped
from hf_algorithms.run.summary import RunSummary
from hf_algorithms.run.supervised_evaluations import list_generation_backends, prepare_evaluations, with_generation
from hf_algorithms.trackers import MetricsHook, prepare_tracking
from hf_algorithms.wiring import build_roles
from hf_engine import SamplingParams
from hf_protocols import ConfigError
from hf_protocols.errors import DataError
from hf_protocols.validation import show

if TYPE_CHECKING:
    from hf_algorithms.data import FileRows, RowOrder
    from hf_algorithms.roles import Roles
    from hf_algorithms.run_directory import RunDirectory
    from hf_controller import BatchFuture, Executor
    from hf_protocols import MappingPlan

__all__ = ["SupervisedInputs", "check_supervised", "load_supervised", "run_supervised"]


@dataclass(frozen=True, kw_only=True)
class SupervisedInputs(ModelInputs):
    """The models and the three data sets of a supervised run."""

    train: SupervisedDataset
    validation: SupervisedDataset
    test: SupervisedDataset
    files: tuple[str, ...]
    """A line for each file: its format, and what its columns are."""

    @property
    def order(self) -> RowOrder:
        """In which order rows of `train` are drawn."""
        return self.train.order

    def count_tokens(self, names: Sequence[str]) -> tuple[int, int]:
        """Returns tokens of a prompt and of a response for which a run is planned.

        They are the longest prompt and the longest response of the named data sets; the two may belong to different
        rows. No row exceeds the smallest context, and neither does their sum: the prompt is cut to it.
        """
        sets: list[SupervisedDataset] = [getattr(self, name) for name in names]
        response = max(data.max_response_tokens for data in sets)
        context = min(each.shape.max_positions for each in self.models.values())
        return min(max(data.max_prompt_tokens for data in sets), context - response), response

    def describe_data(self) -> list[str]:
        """Lines of each file, and of each data set: its key and value, its rows, and what happened to long ones."""
        sets = (self.train, self.validation, self.test)
        return [*self.files, *dict.fromkeys(line for data in sets for line in data.describe_rows())]

    def describe_store(self, config: Config, plan: MappingPlan, *, is_here: bool) -> list[str]:
        """Returns what `describe_supervised_store` does for these rows."""
        held_out = (self.validation, self.test)
        return describe_supervised_store(config, plan, self, train=self.train, held_out=held_out, is_here=is_here)


def run_supervised(
    config: Config,
    directory: RunDirectory,
    *,
    plan: MappingPlan | None = None,
    search_path: Sequence[str] = (),
    on_metrics: MetricsHook | None = None,
    resume: Resumption | None = None,
) -> dict[str, Any]:
    """Trains by a supervised recipe; the run's files and `model/` are left in `directory`.

    Args:
        config: of a command whose recipe is supervised, see `load_config`.
        directory: of the run.
        plan: where the models go; None lets the mapper decide.
        search_path: folders where users' modules are looked for first.
        on_metrics: called with each iteration and its metrics; None takes the function of `run.on_metrics`.
        resume: the run goes on from there.

    Returns:
        The contents of `summary.json`.

    Raises:
        HybridFlowError: for every failure that a user can cause.
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
        inputs, plan = check_supervised(config, fresh, plan=plan, search_path=search_path)
        check_machine(config, plan)
        check_inputs(config, directory)
        with (
            MemoryMeter() as memory,
            RunDisplay(config.run.iterations, started_s=started_s) as display,
            ExitStack() as stack,
        ):
            for line in (*inputs.describe_data(), *inputs.describe_store(config, plan, is_here=True)):
                display.note(line)
            for line in resume.notes if resume is not None else ():
                display.note(f"warning: {line}. It is not used")
            display.phase("starting workers")
            executor = stack.enter_context(build_executor(config, plan))
            inputs, record = begin_run(config, directory, plan, inputs, fresh, search_path=search_path, resume=resume)
            stack.enter_context(tracking.follow(directory, display.note, sections=build_sections(config)))
            facts = _describe_run(config, inputs)
            command = find_command(config.recipe)
            summary = RunSummary(
                attempt,
                executor,
                memory,
                command=command,
                facts=facts,
                plan=plan,
                shapes=describe_attention(config, {role: each.shape for role, each in inputs.models.items()}),
                note=display.note,
            )
            stack.enter_context(summary)
            roles = build_roles(executor, config, plan, inputs, search_path, failed=attempt.restarts.failed)
            evaluations = stack.enter_context(closing(RunEvaluations(config, inputs, executor, roles, search_path)))
            restarts = attempt.restarts
            run = _SupervisedRun(config, directory, inputs, executor, roles, evaluations, display, summary, restarts)
            run.execute(resume, record)
        leave_report(directory.path, display.note)
    return summary.body


def check_supervised(
    config: Config, folder: Path, *, plan: MappingPlan | None = None, search_path: Sequence[str] = ()
) -> tuple[SupervisedInputs, MappingPlan]:
    """Reads what a supervised run needs, and plans it.

    Args:
        config: the run's.
        folder: where a fresh model and its tokenizer are written.
        plan: where the models go; None lets the mapper decide.
        search_path: folders where modules of metrics are looked for first.

    Raises:
        HybridFlowError: for what the run could not use.
    """
    config = merge_given_adapters(config, folder.with_name(MERGED_MODELS))
    check_train_backends(config, plan)
    inputs = prepare_evaluations(config, load_supervised(config, folder), search_path=search_path)
    check_adapters(config, inputs.models)
    shapes = {role: each.shape for role, each in inputs.models.items()}
    sets = {name: getattr(inputs, name) for name in DATA_SETS}
    prompts, responses = inputs.count_tokens(DATA_SETS)
    found = plan or plan_placement(config, shapes, prompt_tokens=prompts, response_tokens=responses)
    found = with_generation(config, found)
    check_plan(config, found, shapes)
    _check_rows(config, found, sets)
    return inputs, found


def load_supervised(config: Config, folder: Path) -> SupervisedInputs:
    """Reads the data and the models of a supervised run.

    Args:
        config: the run's.
        folder: where a fresh model and its tokenizer are written.

    Raises:
        DataError, ConfigError: for a file that is missing or malformed.
    """
    recipe = _recipe_of(config)
    _refuse_unread(config)
    opened = {key: _open_rows(config, key) for key in dict.fromkeys(map(config.data.key_of, DATA_SETS))}
    train = opened["train"]
    rows = {name: opened[config.data.key_of(name)] for name in DATA_SETS}
    rows = {name: part if name == "train" else part.first(config.data.max_eval_rows) for name, part in rows.items()}
    trained = recipe.roles[0]
    model = build_initial_model(
        config.model,
        (text for row in train for text in _list_texts(row)),
        directory=folder,
        seed=config.run.seed,
        backends={**list_main_backends(config), **list_generation_backends(config)},
        rollout_options=config.rollout.options,
        on_cpu=config.cluster.gpu == "cpu",
        head=getattr(trained.load_worker(), "head", "lm"),
    )
    turns, most = build_turn_format(config.data, model), model.shape.max_positions
    sets: dict[str, Any] = {
        name: recipe.build_dataset(
            part,
            model.tokenizer,
            max_tokens=most,
            source=config.data.describe(name),
            turns=turns,
            budget_tokens=config.training.micro_batch_tokens,
            block_tokens=config.data.block_tokens,
            too_long=config.data.too_long,
        )
        for name, part in rows.items()
    }
    models = find_role_models(config, model)
    files = tuple(f"data.{key}: {each.describe()}" for key, part in opened.items() for each in part.files)
    return SupervisedInputs(model=model, models=models, turns=turns, stop_ids=(), files=files, **sets)


def _describe_run(config: Config, inputs: SupervisedInputs) -> dict[str, Any]:
    """Returns the entries of the summary at the beginning of a run."""
    recipe, (prompt_tokens, response_tokens) = _recipe_of(config), inputs.count_tokens(["train"])
    return {
        "algorithm": config.algorithm.name,
        "metric": recipe.metric,
        "lower_is_better": recipe.lower_is_better,
        "workload": compute_workload(config, prompt_tokens=prompt_tokens, response_tokens=response_tokens),
    }


def _recipe_of(config: Config) -> SupervisedRecipe:
    assert isinstance(config.recipe, SupervisedRecipe), "a configuration that was read for a supervised command"
    return config.recipe


def _refuse_unread(config: Config) -> None:
    """Refuses keys of `[data]` that would have no effect."""
    recipe, data = _recipe_of(config), config.data
    for key in recipe.unread_data:
        if (value := getattr(data, key)) != type(data).model_fields[key].default:
            command = find_command(recipe)
            raise ConfigError(f"data.{key} = {show(value)}: `hybridflow {command}` does not read it. Remove it")


def _open_rows(config: Config, key: str) -> FileRows[Any]:
    """Opens a data set and reads its rows once, to find what is wrong with any."""
    data = config.data
    try:
        rows = _recipe_of(config).open_rows(
            data.sources_of(key), config.algorithm, prompt_field=data.prompt_field, answer_field=data.answer_field
        )
        for _ in rows if key == "train" else rows.first(data.max_eval_rows):
            pass
    except DataError as error:
        raise DataError(f"data.{key}: {error}") from error
    return rows


def _list_texts(row: Any) -> Sequence[Row]:
    return [row] if isinstance(row, Row) else row.as_rows()


def _check_rows(config: Config, plan: MappingPlan, sets: Mapping[str, SupervisedDataset]) -> None:
    """Refuses rows above the token budget of a forward pass, and batches with fewer rows than there are ranks."""
    problems = []
    for name, placed in plan.models.items():
        ranks = placed.train.dp_size if placed.train is not None else 1
        batch_size = config.algorithm.model_dump()["batch_size"]
        if batch_size < ranks:
            problems.append(
                f"algorithm.batch_size = {batch_size}: {ranks} data-parallel ranks of the {name} need at least {ranks} "
                "rows. Raise it, or lower cluster.gpus_per_machine"
            )
        for data in sets.values():
            tokens, where = data.longest
            if tokens > placed.micro_batch_tokens:
                problems.append(
                    f"{where}: it needs {tokens} tokens, above training.micro_batch_tokens = "
                    f"{placed.micro_batch_tokens}, which bounds a forward pass. Raise it, or shorten the row"
                )
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))


class _SupervisedRun:
    """The state of a supervised run."""

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        inputs: SupervisedInputs,
        executor: Executor,
        roles: Roles,
        evaluations: RunEvaluations,
        display: RunDisplay,
        summary: RunSummary,
        restarts: Restarts,
    ) -> None:
        self._config = config
        self._recipe = _recipe_of(config)
        self._batch_size: int = config.algorithm.model_dump()["batch_size"]
        self._directory = directory
        self._inputs = inputs
        self._executor = executor
        self._roles = roles
        self._evaluations = evaluations
        self._display = display
        self._ledger = Ledger(directory)
        self._checkpoints = Checkpoints(
            config.run, directory, roles, summary, display.note, lower_is_better=self._recipe.lower_is_better
        )
        self._busy_s = 0.0
        self._held_out = {name: self._put(getattr(inputs, name)) for name in ("validation", "test")}
        self._summary = summary
        self._restarts = restarts
        self._stop = restarts.stop

    def execute(self, resume: Resumption | None, record: Callable[[], None]) -> None:
        """Runs all phases in order; if one fails, the results so far are on disk.

        Args:
            resume: a run that goes on.
            record: writes down its configuration, once the states have been loaded.
        """
        with closing(self._checkpoints):
            if resume is None or resume.program is None:
                self._display.phase("evaluating the starting point")
                self._summarise("before")
                self._commit_model(0)
            else:
                self._display.phase(f"resuming after iteration {resume.iteration}")
                self._busy_s = resume.program.totals["busy_s"]
                self._ledger = Ledger(self._directory, resume.program.ledger)
                self._summary.restore(resume.program)
                self._checkpoints.restore(resume.program)
                resume.load(self._roles)
                record()
            self._restarts.continue_draws(
                self._ledger,
                self._inputs.order,
                None if resume is None else resume.program,
                batch_size=self._batch_size,
                samples=1,
                seed=self._config.run.seed,
            )
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
            self._summarise("after")

    def _iterate(self, iteration: int) -> None:
        config, data = self._config, self._inputs.train
        start_s = time.perf_counter()
        draw = iteration + self._restarts.skipped_draws
        position = self._restarts.count_drawn(iteration - 1, self._batch_size)
        drawn = self._inputs.order.draw_from(position, self._batch_size, seed=config.run.seed)
        rows = [row for _, row in drawn]
        self._ledger.begin(iteration, 1)
        self._ledger.plan([(epoch, row, 0) for epoch, row in drawn])
        batch = self._executor.put(data.batch(rows))
        context = StepContext(
            sampling=SamplingParams(max_new_tokens=1, seed=config.run.seed, step=draw),
            iteration=iteration,
            state={},
            more_prompts=_refuse_more,
            count_prompts_left=lambda: 0,
            pretrain_rows=_refuse_more,
        )
        with self._executor.trace.label(iteration=iteration):
            futures = self._recipe.run_step(self._roles, batch, config.algorithm, context)
            metrics = average_metrics(self._recipe.name, futures)
        self._ledger.settle()
        del batch, futures  # what is evaluated next needs their room in the store
        elapsed_s = time.perf_counter() - start_s
        if iteration % config.run.eval_every == 0 or iteration == config.run.iterations:
            found = self._evaluate("validation")
            metrics |= {f"eval/validation/{name}": value for name, value in found.items()}
            self._commit_model(iteration)
        scores, samples = self._evaluations.evaluate_due(iteration, is_last=iteration == config.run.iterations)
        metrics |= scores
        self._directory.append_samples(iteration, samples)
        self._busy_s += elapsed_s
        metrics["perf/samples_per_s"] = self._batch_size / elapsed_s
        metrics["time/iteration_s"] = elapsed_s
        metrics |= measure_phases(self._executor.trace.drain(), self._roles.groups, iteration)
        metrics |= self._checkpoints.measure() | self._restarts.measure()
        self._summary.update({"iterations": iteration, "ledger": self._ledger.counts})
        self._summary["samples_per_s"] = self._batch_size * iteration / self._busy_s
        for line in describe_skipped(iteration, metrics):
            self._display.note(line)
        self._directory.append_metrics({"iteration": iteration, **metrics})
        self._display.iteration(iteration, metrics)
        self._checkpoints.end_iteration(
            iteration,
            is_last=iteration == config.run.iterations or self._stop.decide(),
            score=metrics.get(f"eval/validation/{self._recipe.metric}"),
            state={},
            totals={"busy_s": self._busy_s, "wall_s": self._summary.wall_s},
            ledger=self._ledger,
            data={"rows_drawn": position + self._batch_size, "rows": len(data)},
            skipped_draws=self._restarts.skipped_draws,
        )

    def _evaluate(self, name: str) -> Mapping[str, float]:
        with self._executor.deadline(evaluation_deadline(self._config)):
            return self._recipe.run_evaluate(
                self._roles, self._held_out[name], len(getattr(self._inputs, name)), self._config.algorithm
            )

    def _summarise(self, when: str) -> None:
        """The metric of the test rows, with its interval where the recipe has one."""
        found, metric = self._evaluate("test"), self._recipe.metric
        self._summary[f"score_{when}"] = found[metric]
        if f"{metric}_low" in found:
            self._summary[f"interval_{when}"] = [found[f"{metric}_low"], found[f"{metric}_high"]]
        self._summary["rows"] = len(self._inputs.test)

    def _commit_model(self, iteration: int) -> None:
        """The weights that were just evaluated are the last good state."""
        tokenizer = self._inputs.model.tokenizer
        with self._directory.replacing("model") as folder:
            trained = self._recipe.roles[0]
            scores = getattr(trained.load_worker(), "head", "lm") == "score"
            group, base = self._roles.groups[trained.name], self._inputs.models[trained.name].path
            for written in export_trained(group, self._config, folder, base=base):
                self._directory.write_files(written, self._inputs.exported_files())
                if scores and (written / "config.json").exists():
                    state_padding(written / "config.json", tokenizer)
        self._summary["model_iteration"] = iteration

    def _put(self, data: SupervisedDataset) -> BatchFuture:
        return self._executor.put(data.batch(range(len(data))))


def _refuse_more(num_rows: int) -> BatchFuture:
    raise ConfigError(f"a supervised step asked for {show(num_rows)} more rows. Use those that it is given")
