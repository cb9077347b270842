"""A Hugging Face directory from all ranks' boxes, one parameter at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_engine.model_directory import VALUE_HEAD, ExportDtype, ExportSource, describe_export
from hf_engine.process_groups import local_device
from hf_engine.resharding.execute import execute_reshard
from hf_engine.resharding.layouts import WeightLayout, replicated_layout
from hf_engine.resharding.plan import plan_reshard
from hf_engine.training.megatron._files import HuggingFaceWriter
from hf_engine.training.megatron._names import EMBEDDING_NAME, HEAD_NAME
from hf_engine.training.megatron._stage import PipelineStage

__all__ = ["export_stage"]


def export_stage(path: Path, source: ExportSource, stage: PipelineStage, *, dtype: ExportDtype) -> None:
    """Gathers every parameter on rank 0, which writes it. Collective over all ranks.

    Args:
        path: an empty directory.
        source: the files from which the model was built.
        stage: what this rank holds.
        dtype: see `TrainBackend.export_hf`.

    Raises:
        OSError: on rank 0, if the file system refuses, after all collectives.
    """
    is_writer = dist.get_rank() == 0
    writer: HuggingFaceWriter | None = None
    failure: OSError | None = None
    if is_writer:
        try:
            writer = HuggingFaceWriter(path, source, _config(source, stage, dtype), dtype=dtype)
        except OSError as error:
            failure = error
    local = stage.local_weights()
    for name, shape in stage.layout.shapes.items():
        layout = _layout_of(stage.layout, name)
        whole = replicated_layout(layout.shapes, [0], dtype=layout.dtype)
        held = {name: local[name]} if name in local else {}
        full = {name: torch.empty(shape, dtype=stage.dtype)} if is_writer else {}
        execute_reshard(plan_reshard(layout, whole), held, full, device=local_device())
        if writer is not None and failure is None:
            try:
                writer.add(stage.stored_name(name), full[name])
            except OSError as error:
                failure = error
    if failure is not None:
        raise failure
    if writer is not None:
        writer.finish()


def _config(source: ExportSource, stage: PipelineStage, dtype: ExportDtype) -> dict[str, Any]:
    shapes = {stage.stored_name(name): shape for name, shape in stage.layout.shapes.items()}
    return describe_export(
        source.config,
        dtype=source.main_dtype if dtype == "source" else dtype,
        vocab_size=shapes[EMBEDDING_NAME][0],
        ties_embeddings=HEAD_NAME not in shapes and VALUE_HEAD not in shapes,
    )


def _layout_of(layout: WeightLayout, name: str) -> WeightLayout:
    boxes = {rank: {name: held[name]} if name in held else {} for rank, held in layout.boxes.items()}
    return WeightLayout(shapes={name: layout.shapes[name]}, boxes=boxes, dtype=layout.dtype)
