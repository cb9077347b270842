"""Sections of a configuration, and the kinds and bounds of their keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import (
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
)

from hf_algorithms.config._deadlines import DeadlinesConfig
from hf_algorithms.config._evaluation import EvaluationConfig
from hf_algorithms.config._lora import ModelLoraConfig
from hf_algorithms.config._messages import describe_problem
from hf_algorithms.config._run import RunConfig
from hf_algorithms.config._scoring import CostConfig, RewardConfig
from hf_algorithms.config._section import Positive, Section, UserPath, described
from hf_algorithms.recipes import RECIPES, AlgorithmConfig, PPOConfig, Recipe, SupervisedRecipe, share_bases
from hf_protocols.paths import expand_path
from hf_protocols.validation import show

__all__ = [
    "ClusterConfig",
    "Config",
    "DataConfig",
    "DataSource",
    "ModelConfig",
    "OptimizerConfig",
    "RoleConfig",
    "RolloutConfig",
    "RunConfig",
    "TrainingConfig",
    "WarmStartConfig",
]

_MOST_SAMPLES = 1 << 20
"""Of one iteration: the controller holds a batch whole, and traces its step with rows that are as many."""

Count = Annotated[int, Field(ge=1, le=1 << 53)]
"""Below what overflows where tensors are counted."""
Slots = Annotated[int, Field(ge=1, le=1 << 16)]
Tokens = Annotated[int, Field(ge=1, le=1 << 40)]
StoreBytes = Annotated[int, Field(ge=75 << 20, le=1 << 53)]
"""At least what Ray needs."""
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


_SIZES = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "max_positions")
"""Of a fresh model, in `[model]`; a model in `path` has its own."""


class DataSource(Section):
    """One of several sources of training rows."""

    path: UserPath
    """Path, pattern or hub name."""
    weight: Positive | None = None
    """Share of this source in every batch, relative to the others'; left out of all: each row comes once per epoch."""


def _read_sources(value: object) -> str | tuple[DataSource, ...]:
    """A path, or a list of paths and tables with a path and a weight."""
    if isinstance(value, str):
        return expand_path(value)
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("must be a path in quotes, or a list of {path = ..., weight = ...}")
    found = []
    for number, each in enumerate(value, start=1):
        try:
            found.append(DataSource.model_validate({"path": each} if isinstance(each, str) else each))
        except ValidationError as error:
            problem = describe_problem(error.errors()[0])
            raise ValueError(f"item {number} is not {{path = ..., weight = ...}}: {problem}") from None
    if len({each.weight is None for each in found}) > 1:
        raise ValueError("some items have a weight and some do not. Set a weight for all or for none")
    return tuple(found)


def _write_sources(sources: str | tuple[DataSource, ...]) -> str | list[dict[str, Any]]:
    return sources if isinstance(sources, str) else [each.model_dump(exclude_none=True) for each in sources]


class DataConfig(Section):
    """`[data]`: rows as JSONL, JSON, CSV, Parquet, directories that `datasets` saved, or names on its hub."""

    train: Annotated[str | tuple[DataSource, ...], PlainValidator(_read_sources), PlainSerializer(_write_sources)]
    """Training rows: a path, a pattern such as `data/*.parquet`, a hub name `OWNER/NAME:SPLIT`, or a list of
    `{path, weight}`.
    """
    validation: UserPath | None = None
    """Path of the rows that are evaluated during a run; left out: the first rows of `train`."""
    test: UserPath | None = None
    """Path of the held-out rows that are evaluated before and after; left out: the validation rows."""
    pretraining: UserPath | None = None
    """Path of what `algorithm.ptx_coefficient` learns: texts in a field `text`, or prompts with answers; left out:
    `train`.
    """
    block_tokens: Tokens | None = None
    """Tokens of the blocks into which texts are split: those of `pretraining`, and in `sft` those of `train`. Left out:
    512, or as many as fit.
    """
    prompt_field: str | None = None
    """Name of the field that holds the prompt, with dots into nested ones; left out: found by its name."""
    answer_field: str | None = None
    """Name of the field that holds the reference answer, in the same way; rows may lack it."""
    chat_template: str | None = None
    """File of a chat template, or its text in Jinja; left out: the tokenizer's. Text prompts become messages by it."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the chat template, such as `{enable_thinking = false}`."""
    system_prompt: str | None = None
    """First message of every chat that has no system message; text prompts become messages next to it."""
    max_eval_rows: Count = 500
    """Rows of validation and test that are used, from the first."""
    max_prompt_tokens: Tokens | None = None
    """Tokens of a prompt at most; left out: what the model's context and `training.micro_batch_tokens` leave for it."""
    too_long: Literal["error", "drop", "truncate_left"] = "error"
    """Longer prompts end the run before it starts, are left out, or lose their beginning."""

    @field_validator("template_options")
    @classmethod
    def _hold_as_toml(cls, options: dict[str, Any]) -> dict[str, Any]:
        return cast("dict[str, Any]", _as_lists(options))

    def key_of(self, rows: str) -> str:
        """The key that names the file of `train`, `validation` or `test`: its own, or the one that stands in."""
        if rows == "pretraining":
            return rows if self.pretraining is not None else "train"
        if rows == "test" and self.test is None:
            rows = "validation"
        return "train" if rows == "validation" and self.validation is None else rows

    def sources_of(self, rows: str) -> list[tuple[str, float | None]]:
        """Paths of `train`, `validation`, `test` or `pretraining` with their weights."""
        found = getattr(self, self.key_of(rows))
        return [(found, None)] if isinstance(found, str) else [(each.path, each.weight) for each in found]

    def describe(self, rows: str) -> str:
        """Key and value of a data set as the user wrote them, for messages."""
        key, found = self.key_of(rows), getattr(self, self.key_of(rows))
        return f"data.{key} = {show(found if isinstance(found, str) else [each.path for each in found])}"


class ModelConfig(Section):
    """`[model]`: a model that transformers loads, or the sizes of a fresh Llama."""

    path: UserPath | None = None
    """Local directory or hub name; left out: a fresh model of the sizes below. With a path other sizes are refused."""
    tokenizer: UserPath | None = None
    """`characters` or `bpe` (made from the training rows), a directory or a hub name; left out: the one of `path`."""
    export_dtype: Literal["source", "float32", "bfloat16", "float16"] = "source"
    """dtype of exported weights; `source`: the one that each tensor has in the files of `path`."""
    lora: ModelLoraConfig | None = None
    """`[model.lora]`: low-rank adapters are trained, the weights stay; left out: the weights are trained."""
    vocab_size: Count = 2048
    """Size of a tokenizer that is trained."""
    hidden_size: Count = 160
    """Width of a fresh model; a multiple of `num_heads`."""
    intermediate_size: Count = 448
    """Width of a fresh model's feed-forward layers."""
    num_layers: Count = 3
    """Decoder layers of a fresh model."""
    num_heads: Count = 5
    """Attention heads of a fresh model."""
    max_positions: Count = 32
    """Context length of a fresh model: prompt and response together."""

    def sizes_given(self) -> dict[str, int]:
        """Sizes of a fresh model that were given, not left to their defaults."""
        return {key: getattr(self, key) for key in _SIZES if key in self.model_fields_set}

    @model_serializer(mode="wrap")
    def _leave_out_sizes_beside_a_path(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves the sizes out next to a `path`, so that the written file reads back: they are a fresh model's."""
        return {key: value for key, value in write(self).items() if self.path is None or key not in _SIZES}


class WarmStartConfig(Section):
    """`[warm_start]`: supervised training before the algorithm starts."""

    max_steps: Annotated[int, Field(ge=0)] = 0
    """Steps at most; 0: no warm start."""
    batch_size: Count = 256
    """Rows of one step."""
    learning_rate: Positive = 1e-3
    """Of AdamW, constant."""
    eval_every: Count = 10
    """Steps between two evaluations on the validation rows."""
    stop_at: Share | None = None
    """Stop at the first evaluation that reaches this; an error if none does. Left out: run all steps."""
    fail_above: Share = 1.0
    """An error if the evaluation that stops is above this."""


class OptimizerConfig(Section):
    """`[optimizer]`: AdamW of actor and critic."""

    actor_learning_rate: Positive = 1e-6
    """Of the actor, after `warmup_steps`."""
    critic_learning_rate: Positive = 1e-5
    """Of every critic, and of a reward model that is trained, after `warmup_steps`."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    """Decays of AdamW's averages of the gradient and of its square."""
    weight_decay: Annotated[float, Field(ge=0, le=1e30)] = 0.0
    """Of AdamW, decoupled from the gradient."""
    max_grad_norm: Positive = 1.0
    """Gradients of a larger norm, over all ranks, are scaled to this one."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Updates in which the learning rate grows to its value. Adam's first steps have full size but are dominated by
    noise.
    """


class RolloutConfig(Section):
    """`[rollout]`: generation."""

    backend: str = "transformers"
    """Name of a `hf_engine.rollout_backends` entry point."""
    batch_size: Annotated[int, Field(ge=1, le=_MOST_SAMPLES)] = 128
    """Prompts of one iteration, over all ranks; with `samples_per_prompt` at most 2**20 samples."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=_MOST_SAMPLES)] = 1
    """Responses to each prompt; algorithms that compare them need at least 2."""
    max_new_tokens: Count = 256
    """Tokens of a response at most, its end token included."""
    temperature: Annotated[float, Field(ge=1e-6, allow_inf_nan=False)] = 1.0
    """Divides the logits; `top_k = 1` draws the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draws among the likeliest tokens that together have this probability; 1: all tokens."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Draws among that many of the likeliest tokens; 0: all tokens."""
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    """No response ends before this many tokens."""
    stop: tuple[str, ...] = Field(default=(), strict=False)
    """Texts that end a response; the token that completes one is kept."""
    bucket_bytes: Annotated[int, Field(ge=1, le=1 << 53)] | None = None
    """Bound on the buffers in which weights travel to the rollout backend; by default the engine's own."""
    verify_transfers: bool = False
    """Sends a digest with every message of weights to the rollout backend: an error on all ranks if bytes changed on
    the way. Costs a pass over the bytes that are sent and received."""
    options: dict[str, Any] = Field(default_factory=dict)
    """More of what the backend's `build` takes: `cache_bytes` or `cache_fraction` for keys and values."""

    @field_validator("options")
    @classmethod
    def _hold_as_toml(cls, options: dict[str, Any]) -> dict[str, Any]:
        return cast("dict[str, Any]", _as_lists(options))

    @field_validator("samples_per_prompt")
    @classmethod
    def _bound_samples(cls, samples: int, known: ValidationInfo) -> int:
        size = known.data.get("batch_size", 1)
        if size * samples > _MOST_SAMPLES:
            raise ValueError(
                f"with rollout.batch_size = {size} an iteration has more than {_MOST_SAMPLES} samples. Lower "
                "rollout.batch_size or rollout.samples_per_prompt"
            )
        return samples


class TrainingConfig(Section):
    """`[training]`: the backend of roles with a model; `[roles.NAME]` names another for one of them."""

    backend: str = "fsdp"
    """Name of a `hf_engine.train_backends` entry point."""
    micro_batch_tokens: Tokens = 8192
    """Most tokens of one forward pass, padding included.

    On a CPU `fsdp` ends a pass of several rows at 1,024 tokens for each thread, because larger ones are not faster. It
    does not with `shard = "layer"` on several ranks.
    """
    shard: Literal["root", "layer"] = "layer"
    """FSDP units: the whole model (small models), or each decoder layer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the computation; trained weights and the optimizer's state are float32."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of learning rates after `optimizer.warmup_steps`: unchanged, or down to 0 at the last update. That of the
    warm start is `warm_start.learning_rate`, constant.
    """
    activation_checkpointing: bool = False
    """Recomputes each decoder layer in the backward pass: less memory, more time."""
    balance_tokens: bool = False
    """Gives ranks rows of equal token sums. Results stay in the batch's order."""
    attn_implementation: Literal["auto", "eager", "sdpa", "flex_attention"] = "auto"
    """Function of attention, by transformers' name. `"auto"` is transformers' own choice, or `"eager"` for a
    model with a cap on attention's logits (Gemma 2), which SDPA leaves out. `"flex_attention"` needs a GPU, and skips
    the pairs of tokens that do not see each other in packed rows; it has not been run on a GPU yet.
    The backend `megatron` has `"sdpa"` only, which is its `"auto"`.
    """
    shared_prompts: Annotated[Literal["auto"] | bool, described("must be 'auto', true or false")] = "auto"
    """Computes a prompt once for all responses to it in a batch: where that saves work (`"auto"`), wherever it fits, or
    never. `"auto"` and true also put rows of different lengths in one packed row, where that is less work than
    padding. Models of which this would change more than rounding pad rows apart, and say so at the first prompt that
    two rows have in common.
    """
    compile: bool = False
    """Compiles decoder layers; takes minutes at first, and needs a C++ compiler."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """An update whose loss or gradient norm is NaN, infinite or above `explode_above` ends the run, or is left out: its
    role's weights and optimizer stay as they were. With `"rollback"` the run goes on from its last commit with other
    draws, as often as `run.max_restarts` allows.
    """
    explode_above: Positive | None = None
    """Bound on the size of a loss and on its gradient's norm before clipping; left out: any finite number is taken."""


class ClusterConfig(Section):
    """`[cluster]`: the machines that the mapper plans for."""

    gpu: str = "cpu"
    """Kind of GPU, such as `h100` or `a100-80`; `cpu`: host processes."""
    machines: Slots = 1
    """Machines of the cluster, all alike."""
    gpus_per_machine: Slots | None = None
    """Ranks per machine; left out: 2, or on the host 1 where `hybridflow doctor --calibrate` found one rank faster."""
    inter_bandwidth_bytes_per_s: Positive = 25e9
    """Between machines, one way; used where there is more than one."""
    address: Annotated[str, Field(min_length=1)] = "local"
    """Address of a running Ray cluster; `local`: one of the run's own on this machine."""
    call_timeout_s: Positive = 600.0
    """Deadline of one call to a worker group; `[deadlines]` has one for each phase."""
    object_store_bytes: StoreBytes | None = None
    """Shared memory for batches in the run's own Ray cluster, taken as it is used; left out: 30 % of the memory that
    the program may use, at most what is free in `/dev/shm`. A batch that does not fit goes to disk, which is slow: a
    run says so before it starts.
    """


class RoleConfig(Section):
    """`[roles.NAME]`: overrides what the recipe declares for one of its roles; keys left out stay as declared."""

    path: UserPath | None = None
    """Model directory or hub name; left out: what the recipe declares, in most cases the actor's."""
    learning_rate: Positive | None = None
    """Left out: that of `[optimizer]`."""
    backend: str | None = None
    """Name of a `hf_engine.train_backends` entry point; left out: `training.backend`."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Left out: `training.dtype`."""


class Config(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    data: DataConfig
    model: ModelConfig = ModelConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    algorithm: SerializeAsAny[AlgorithmConfig] = PPOConfig()
    roles: dict[str, RoleConfig] = Field(default_factory=dict)
    optimizer: OptimizerConfig = OptimizerConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    cost: CostConfig = CostConfig()
    evaluation: tuple[EvaluationConfig, ...] = Field(default=(), strict=False)
    training: TrainingConfig = TrainingConfig()
    cluster: ClusterConfig = ClusterConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()

    _own_recipe: Recipe | None = PrivateAttr(None)

    @property
    def recipe(self) -> Recipe:
        """The algorithm: a shipped one by its name, or the user's own; with the models that score for its roles.

        With `[model.lora]` the reference is the policy without its adapters, and has no role of its own. With
        `[[evaluation]]` a policy that learns from rows generates too.
        """
        recipe = (self._own_recipe or RECIPES[self.algorithm.name]).with_scorers(self.scorer_paths)
        if self.evaluation and isinstance(recipe, SupervisedRecipe):
            recipe = recipe.with_generator()
        if self.model.lora is None:
            return recipe
        return share_bases(recipe, [name for name, given in self.roles.items() if given.model_fields_set])

    @property
    def scorer_paths(self) -> dict[str, str]:
        """Directory of `[reward.model]` and its like, by the section."""
        sections = {"reward": self.reward.model, "cost": self.cost.model}
        return {name: model.path for name, model in sections.items() if model is not None}

    def count_updates(self) -> int:
        """Optimizer steps of a role in the whole run, the warm start left out."""
        return self.run.iterations * self.algorithm.epochs * self.algorithm.mini_batches

    def train_backend(self, role: str) -> tuple[str, str]:
        """Returns the key that names the training backend of a role, and its value."""
        own = self.role(role).backend
        return ("training.backend", self.training.backend) if own is None else (f"roles.{role}.backend", own)

    def role(self, name: str) -> RoleConfig:
        """Returns the overrides of `[roles.NAME]`; without such a section, none."""
        return self.roles.get(name, RoleConfig())


def _as_lists(value: Any) -> Any:
    """The value with lists for tuples, as TOML gives it back."""
    if isinstance(value, Mapping):
        return {key: _as_lists(each) for key, each in value.items()}
    return [_as_lists(each) for each in value] if isinstance(value, list | tuple) else value
