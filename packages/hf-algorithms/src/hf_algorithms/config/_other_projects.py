"""Keys of TRL and verl, and those that stand for them here: for messages and for the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hf_protocols.validation import show

__all__ = ["FOREIGN_KEYS", "ForeignKey", "find_foreign"]


class ForeignKey(NamedTuple):
    """A key of another project.

    Attributes:
        name: there; its last part is unique in the project, or the part before it is needed.
        ours: the key here.
        note: on other units, values or defaults; empty if there are none.
    """

    name: str
    ours: str
    note: str = ""


_UPDATES_OF_TRL = "number of updates: `steps_per_generation` divided by `gradient_accumulation_steps`"
_PASS = "rows of a pass there, tokens here: it bounds memory, and updates are the same"
_SUPERVISED = "`sft`, `dpo` and `reward-model`"

FOREIGN_KEYS: Mapping[str, Sequence[ForeignKey]] = {
    "TRL": (
        ForeignKey("model_name_or_path", "model.path"),
        ForeignKey("output_dir", "run.output_dir"),
        ForeignKey("max_steps", "run.iterations", "updates there; an iteration has `epochs` x `mini_batches` of them"),
        ForeignKey("num_train_epochs", "run.iterations", "passes over the rows there"),
        ForeignKey("num_generations", "rollout.samples_per_prompt", "8 by default there, 1 here"),
        ForeignKey("generation_batch_size", "rollout.batch_size", "responses there, prompts here"),
        ForeignKey("max_completion_length", "rollout.max_new_tokens"),
        ForeignKey("max_prompt_length", "data.max_prompt_tokens"),
        ForeignKey("num_iterations", "algorithm.epochs"),
        ForeignKey("steps_per_generation", "algorithm.mini_batches", _UPDATES_OF_TRL),
        ForeignKey("gradient_accumulation_steps", "algorithm.mini_batches", _UPDATES_OF_TRL),
        ForeignKey("per_device_train_batch_size", "algorithm.batch_size", f"of {_SUPERVISED}: rows of an update"),
        ForeignKey("per_device_train_batch_size", "training.micro_batch_tokens", _PASS),
        ForeignKey("learning_rate", "optimizer.actor_learning_rate"),
        ForeignKey("lr_scheduler_type", "training.learning_rate_schedule", "`linear` by default there"),
        ForeignKey("warmup_steps", "optimizer.warmup_steps"),
        ForeignKey("adam_beta1", "optimizer.betas", "the first of two"),
        ForeignKey("adam_beta2", "optimizer.betas", "the second of two; 0.999 by default there, 0.95 here"),
        ForeignKey("bf16", "training.dtype", "`bfloat16`"),
        ForeignKey("gradient_checkpointing", "training.activation_checkpointing", "true by default there"),
        ForeignKey("torch_compile", "training.compile"),
        ForeignKey("beta", "algorithm.kl_coefficient", "of GRPO and RLOO; that of DPO has the same name"),
        ForeignKey("epsilon", "algorithm.clip_low"),
        ForeignKey("epsilon_high", "algorithm.clip_high"),
        ForeignKey("delta", "algorithm.dual_clip"),
        ForeignKey("loss_type", "algorithm.aggregation", "`dr_grpo`, `cispo` and others are algorithms here"),
        ForeignKey("scale_rewards", "algorithm.std_over"),
        ForeignKey("importance_sampling_level", "algorithm.name", "`sequence` is `gspo`"),
        ForeignKey("mask_truncated_completions", "algorithm.overlong_filter"),
        ForeignKey("entropy_coef", "algorithm.entropy_coefficient"),
        ForeignKey("vllm_importance_sampling_mode", "algorithm.correction"),
        ForeignKey("vllm_importance_sampling_clip_min", "algorithm.correction_low"),
        ForeignKey("vllm_importance_sampling_clip_max", "algorithm.correction_high"),
        ForeignKey("reward_funcs", "reward.functions"),
        ForeignKey("reward_weights", "reward.functions", "`weight` of each"),
        ForeignKey("use_vllm", "rollout.backend", "`vllm`"),
        ForeignKey("vllm_gpu_memory_utilization", "rollout.options", "`cache_bytes` or `cache_fraction`"),
        ForeignKey("chat_template_kwargs", "data.template_options"),
        ForeignKey("report_to", "run.trackers"),
        ForeignKey("save_steps", "run.checkpoint_every"),
        ForeignKey("save_total_limit", "run.keep"),
        ForeignKey("eval_steps", "run.eval_every"),
        ForeignKey("max_length", "data.too_long", "the longest row is what the model's context holds"),
        ForeignKey("packing", "training.shared_prompts", "rows share a pass without padding by default"),
        ForeignKey("completion_only_loss", "data.answer_field", "answers alone are trained"),
        ForeignKey("assistant_only_loss", "data.answer_field", "the assistant's messages alone are trained"),
        ForeignKey("lora.r", "model.lora.rank"),
        ForeignKey("lora_alpha", "model.lora.alpha"),
        ForeignKey("lora_dropout", "model.lora.dropout"),
        ForeignKey("target_modules", "model.lora.targets"),
    ),
    "verl": (
        ForeignKey("actor_rollout_ref.model.path", "model.path"),
        ForeignKey("actor_rollout_ref.model.lora_rank", "model.lora.rank"),
        ForeignKey("actor_rollout_ref.model.lora_alpha", "model.lora.alpha"),
        ForeignKey("actor_rollout_ref.model.target_modules", "model.lora.targets"),
        ForeignKey("actor_rollout_ref.model.enable_gradient_checkpointing", "training.activation_checkpointing"),
        ForeignKey("data.train_files", "data.train"),
        ForeignKey("data.val_files", "data.validation"),
        ForeignKey("data.prompt_key", "data.prompt_field"),
        ForeignKey("data.train_batch_size", "rollout.batch_size"),
        ForeignKey("data.max_prompt_length", "data.max_prompt_tokens"),
        ForeignKey("data.max_response_length", "rollout.max_new_tokens"),
        ForeignKey("data.truncation", "data.too_long", "`left` is `truncate_left`"),
        ForeignKey("data.filter_overlong_prompts", "data.too_long", "`drop`"),
        ForeignKey("actor_rollout_ref.rollout.name", "rollout.backend"),
        ForeignKey("actor_rollout_ref.rollout.n", "rollout.samples_per_prompt"),
        ForeignKey(
            "actor_rollout_ref.rollout.gpu_memory_utilization", "rollout.options", "`cache_bytes` or `cache_fraction`"
        ),
        ForeignKey("actor_rollout_ref.rollout.val_kwargs.temperature", "evaluation.temperature"),
        ForeignKey("actor_rollout_ref.rollout.val_kwargs.n", "evaluation.samples"),
        ForeignKey("actor_rollout_ref.actor.strategy", "training.backend"),
        ForeignKey("actor_rollout_ref.actor.optim.lr", "optimizer.actor_learning_rate"),
        ForeignKey("critic.optim.lr", "optimizer.critic_learning_rate"),
        ForeignKey(
            "actor_rollout_ref.actor.optim.lr_warmup_steps", "optimizer.warmup_steps", "iterations there, updates here"
        ),
        ForeignKey("actor_rollout_ref.actor.optim.lr_scheduler_type", "training.learning_rate_schedule"),
        ForeignKey("actor_rollout_ref.actor.optim.clip_grad", "optimizer.max_grad_norm"),
        ForeignKey(
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            "algorithm.mini_batches",
            "number of updates: `train_batch_size` divided by `ppo_mini_batch_size`",
        ),
        ForeignKey("actor_rollout_ref.actor.ppo_epochs", "algorithm.epochs"),
        ForeignKey("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "training.micro_batch_tokens", _PASS),
        ForeignKey("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "training.micro_batch_tokens"),
        ForeignKey("actor_rollout_ref.actor.clip_ratio", "algorithm.clip_low", "and `clip_high`"),
        ForeignKey("actor_rollout_ref.actor.clip_ratio_low", "algorithm.clip_low"),
        ForeignKey("actor_rollout_ref.actor.clip_ratio_high", "algorithm.clip_high"),
        ForeignKey("actor_rollout_ref.actor.clip_ratio_c", "algorithm.dual_clip"),
        ForeignKey("actor_rollout_ref.actor.loss_agg_mode", "algorithm.aggregation"),
        ForeignKey("actor_rollout_ref.actor.loss_scale_factor", "algorithm.loss_denominator"),
        ForeignKey("actor_rollout_ref.actor.entropy_coeff", "algorithm.entropy_coefficient"),
        ForeignKey("actor_rollout_ref.actor.use_kl_loss", "algorithm.kl_place", "`loss`"),
        ForeignKey("actor_rollout_ref.actor.kl_loss_coef", "algorithm.kl_coefficient"),
        ForeignKey("actor_rollout_ref.actor.kl_loss_type", "algorithm.kl_estimator", "`low_var_kl` is `k3`"),
        ForeignKey("algorithm.use_kl_in_reward", "algorithm.kl_place", "`reward`"),
        ForeignKey("algorithm.kl_penalty", "algorithm.kl_estimator", "`kl` is `k1`"),
        ForeignKey("algorithm.kl_ctrl.kl_coef", "algorithm.kl_coefficient"),
        ForeignKey("algorithm.kl_ctrl.target_kl", "algorithm.kl_target", "nats per token there, per response here"),
        ForeignKey("algorithm.adv_estimator", "algorithm.name", "`gae` is `ppo`"),
        ForeignKey("algorithm.lam", "algorithm.gae_lambda"),
        ForeignKey("algorithm.norm_adv_by_std_in_grpo", "algorithm.std_over", "false is `none`"),
        ForeignKey("algorithm.filter_groups.metric", "algorithm.filter_metric", "of `dapo`"),
        ForeignKey("algorithm.filter_groups.max_num_gen_batches", "algorithm.max_refills", "of `dapo`"),
        ForeignKey("algorithm.rollout_correction.rollout_is", "algorithm.correction"),
        ForeignKey("algorithm.rollout_correction.rollout_is_threshold", "algorithm.correction_high"),
        ForeignKey("critic.cliprange_value", "algorithm.value_clip"),
        ForeignKey("trainer.critic_warmup", "algorithm.critic_warmup"),
        ForeignKey("reward.custom_reward_function.path", "reward.function", "`file.py:function`"),
        ForeignKey("reward.reward_model.model_path", "reward.model", "`path`"),
        ForeignKey("trainer.total_training_steps", "run.iterations"),
        ForeignKey("trainer.total_epochs", "run.iterations", "passes over the rows there"),
        ForeignKey("trainer.save_freq", "run.checkpoint_every"),
        ForeignKey("trainer.max_actor_ckpt_to_keep", "run.keep"),
        ForeignKey("trainer.test_freq", "run.eval_every"),
        ForeignKey("trainer.logger", "run.trackers"),
        ForeignKey("trainer.default_local_dir", "run.output_dir"),
        ForeignKey("trainer.balance_batch", "training.balance_tokens"),
        ForeignKey("trainer.nnodes", "cluster.machines"),
        ForeignKey("trainer.n_gpus_per_node", "cluster.gpus_per_machine"),
    ),
}
"""By project, in the order of what a user writes first; without those of the same name, such as `top_p`."""


def find_foreign(key: str, known: Sequence[str] = ()) -> tuple[str, str] | None:
    """Returns the projects that have a key, and the keys that stand for it here, as messages name them.

    Args:
        key: its last part, or more of its end: `lr`, `optim.lr`.
        known: keys and sections that the configuration has, to which those here must belong; empty for all.
    """
    found = {
        project: [each for each in keys if f".{each.name}".endswith(f".{key}") and _is_known(each.ours, known)]
        for project, keys in FOREIGN_KEYS.items()
    }
    every = [each for keys in found.values() for each in keys]
    if not every:
        return None
    ours = " or ".join(dict.fromkeys(show(each.ours) for each in every))
    note = next((each.note.replace("`", "'") for each in every if each.note), "")
    return " and ".join(project for project, keys in found.items() if keys), f"{ours} ({note})" if note else ours


def _is_known(key: str, known: Sequence[str]) -> bool:
    return not known or any(key == each or key.startswith(f"{each}.") for each in known)
