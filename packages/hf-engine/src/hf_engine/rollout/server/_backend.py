"""The rollout backend: ranks that ask servers elsewhere for samples, and hand them weights through files."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from hf_engine.agreement import together
from hf_engine.backends.base import SamplingParams
from hf_engine.backends.build_arguments import check_rollout_arguments
from hf_engine.model_directory import (
    ModelDirectory,
    check_model_directory,
    read_end_of_sequence_ids,
    read_model_directory,
)
from hf_engine.resharding.layouts import WeightLayout, spread_layout
from hf_engine.rollout.engine_rules import require_known_layout
from hf_engine.rollout.loading import WeightState
from hf_engine.rollout.replica import require_process_group
from hf_engine.rollout.server._again import find_again
from hf_engine.rollout.server._connection import LostServerError, ServerConnection, expected_form
from hf_engine.rollout.server._dialect import Dialect, Sample
from hf_engine.rollout.server._files import WeightFiles
from hf_engine.rollout.server._identify import identify
from hf_engine.rollout.server._setup import (
    check_model,
    check_ranks,
    check_urls,
    choose_directory,
    read_key,
)
from hf_protocols.errors import BackendError
from hf_protocols.models import ModelShape
from hf_protocols.topology import GenerationSpec, Topology
from hf_protocols.validation import Checks, show

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["ServerBackend"]

_check = Checks(BackendError)

Result = TypeVar("Result")


class ServerBackend:
    """Generation by SGLang or vLLM servers that the user started; see `RolloutBackend` for what every method means.

    Rank r asks server r modulo their number. The servers draw with their own numbers, from a seed of ours for every
    sample. New weights go through safetensors files in a directory that the ranks and the servers share. A server that
    was lost, and is started again at its URL, gets the last weights and the requests that it did not answer.

    Supports `gen_tp_size = gen_pp_size = 1`, for any layout inside a server, and models whose parameters
    `ModelShape` knows.
    """

    largest_generation: ClassVar[GenerationSpec | None] = GenerationSpec()

    def __init__(
        self,
        server: Dialect,
        *,
        find: Callable[[], Dialect],
        restart_timeout_s: float,
        num_servers: int,
        some_can_release: bool,
        directory: Path,
        shape: ModelShape,
        stops: frozenset[int],
        files: WeightFiles,
    ) -> None:
        facts = server.facts
        self._server = server
        self._find = find
        self._restart_timeout_s = restart_timeout_s
        self._speaks = dist.get_rank() < num_servers
        self._directory = directory
        self._files = files
        self._layout = spread_layout(shape.parameters(), range(dist.get_world_size()), dtype=facts.dtype)
        self._weight_bytes = shape.num_parameters * self._layout.element_bytes
        self._cache_bytes = facts.cache_tokens * shape.kv_bytes_per_token * self._layout.element_bytes // 2
        self._vocab_size = shape.vocab_size
        self._max_positions = min(shape.max_positions, facts.max_positions)
        self._stops = stops
        self._some_can_release = some_can_release
        self._stamp = facts.stamp
        self._state = WeightState(self._layout)
        self._has_freed = False

    @classmethod
    def build(
        cls,
        model: str | Path,
        *,
        topology: Topology,
        seed: int = 0,
        urls: Sequence[str] = (),
        weights_directory: str | Path | None = None,
        api_key_variable: str | None = None,
        reproducible: bool = True,
        connect_timeout_s: float = 10.0,
        timeout_s: float = 3600.0,
        restart_timeout_s: float = 60.0,
    ) -> ServerBackend:
        """Finds the servers and compares them with the model. Collective over the ranks of the default process group.

        Args:
            model: directory or hub name: what the servers were started with.
            topology: ranks; every one is a generation replica.
            seed: nothing is drawn here; samples derive from `SamplingParams.seed`.
            urls: of the servers, such as `http://127.0.0.1:30000`; rank r asks number r modulo their number.
            weights_directory: for weights on their way, under one path on the ranks' machines and the servers'; by
                default the system's for temporary files, for servers on this machine.
            api_key_variable: environment variable with the servers' API key; None without a key.
            reproducible: refuse servers that do not draw from the seeds that they are given.
            connect_timeout_s: deadline for a server to take a connection, and to say what it is.
            timeout_s: deadline of a whole `generate`, and of each step of an update of weights.
            restart_timeout_s: deadline for a server that was lost to answer at its URL again; 0: none is waited for.

        Raises:
            BackendError: on every rank, if a server does not answer, is none of a supported version, or has another
                model; for a generation layout other than 1-1.
        """
        require_process_group("server")
        with together("no rank asks a server"):
            check_rollout_arguments(topology, seed)
            check_ranks(topology, urls)
            _check_restart(restart_timeout_s)
        url = urls[dist.get_rank() % len(urls)]

        with together("no rank asks a server"):
            files = read_model_directory(model, needs_weights=False)
            check_model_directory(files)
            directory, shape = files.path, require_known_layout(files)
            key = read_key(api_key_variable)
            connection = ServerConnection(url, key=key, connect_timeout_s=connect_timeout_s, timeout_s=timeout_s)
            find = partial(identify, connection, files.dtype or "float32")
            with expected_form(url):
                server = find()
                check_model(server, files, shape)
            if reproducible and not server.facts.has_seeds:
                raise BackendError(
                    f"{server.facts.name} does not draw from seeds. Start it with {server.facts.seeds_knob}, or set "
                    "rollout.options.reproducible to false for samples that no second run has"
                )
            stops = read_end_of_sequence_ids(files)
            folder = choose_directory(weights_directory, connection)
        gathered: list[tuple[str, bool, str]] = [("", False, "")] * dist.get_world_size()
        run = f"hf-engine-{uuid.uuid4().hex[:12]}"
        dist.all_gather_object(gathered, (server.facts.dtype, server.facts.can_release, run))
        dtypes, can_release, (run, *_) = zip(*gathered, strict=True)
        if len({*dtypes}) > 1:
            raise BackendError(f"the servers {list(urls)} compute in {[*dtypes]}. Start them with one --dtype")
        return cls(
            server,
            find=find,
            restart_timeout_s=restart_timeout_s,
            num_servers=len(urls),
            some_can_release=any(can_release),
            directory=directory,
            shape=shape,
            stops=stops,
            files=WeightFiles(folder, run, dist.get_rank()),
        )

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuses URLs and deadlines that reach no server, and a missing directory; see `SupportsOptionCheck`."""
        urls = options.get("urls", ())
        check_urls(urls)
        _check_restart(options.get("restart_timeout_s", 0.0))
        names = ("connect_timeout_s", "timeout_s")
        for url in urls:
            connection = ServerConnection(
                url, **{name: options.get(name, 1.0) for name in names}
            )  # connects with a request
            choose_directory(options.get("weights_directory"), connection)

    @classmethod
    def check_model(cls, model: ModelDirectory, *, on_cpu: bool, options: Mapping[str, Any] | None = None) -> None:
        """Refuses families without a known layout; see `SupportsModelCheck`."""
        del on_cpu, options
        require_known_layout(model)

    @property
    def weight_version(self) -> int:
        """The version last committed; 0 for the weights that the servers had."""
        return self._state.version

    @property
    def engine_bytes(self) -> int:
        """Bytes of weights and KV cache of the server that this rank updates; 0 on ranks that update none.

        They are the server's memory, on any machine.
        """
        return self._weight_bytes + self._cache_bytes - self._freed_bytes() if self._speaks else 0

    @property
    def staging_bytes(self) -> int:
        """The files that this rank writes, in memory where `weights_directory` is."""
        return self._layout.held_bytes(dist.get_rank())

    def weight_layout(self) -> WeightLayout:
        """Every parameter whole on one rank, which writes it to a file; a tied embedding once."""
        return self._layout

    def find_unsupported(self, sampling: SamplingParams) -> str | None:
        """Returns the reason why `generate` refuses to draw so; see `SupportsEngineSampling`."""
        return self._server.find_unsupported(sampling)

    def begin_weights(self) -> None:
        """Starts an update; see `SupportsShardLoading`."""
        self._state.begin()
        with together("no update was begun"):
            self._files.begin()

    def load_shards(self, shards: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Writes this rank's parameters to a file."""
        with together("no weights were written"):
            self._state.check_shards(shards)
            if shards:
                self._files.write({name: whole for name, (whole,) in shards.items()})
            self._state.add(shards)

    def load_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Writes the training model's buffers to a file of rank 0; see `SupportsBufferLoading`."""
        with together("no buffers were written"):
            self._state.require_update("load_buffers")
            if dist.get_rank() == 0:
                self._files.write(buffers)

    def commit_weights(self, version: int) -> None:
        """Has every server load the files, checks what it says, and stamps the samples that follow.

        Raises:
            ReshardError: if parameters did not arrive since `begin_weights`, or a server did not take them.
        """
        with together("the weights were not committed"):
            self._state.check_commit(version)
        if not self._state.is_updating:
            self._speak("the weights were not committed", lambda server: server.flush())
        else:
            self._stamp = self._files.stamp
            folder, stamp = self._files.folder, self._stamp
            self._speak("the weights were not committed", lambda server: server.load_weights(folder, stamp))
        self._state.commit(version)

    def generate(self, batch: TensorDict, sampling: SamplingParams) -> TensorDict:
        """Draws `sampling.n` responses to every prompt; see `RolloutBackend.generate`."""
        from hf_engine.rollout.responses import LENGTH, STOP, build_responses, read_prompts
        from hf_engine.rollout.sampling import draw_seeds
        from hf_engine.rollout.stop_strings import load_stop_strings

        read_prompts(batch, sampling, vocab_size=self._vocab_size, positions=self._max_positions, ends=self._stops)
        self._state.check_ready()
        self._refuse_unsupported(self._server, sampling)
        strings = load_stop_strings(self._directory, sampling)
        prompts = [row.tolist() for row in batch["prompt_ids"].unbind() for _ in range(sampling.n)]
        seeds = draw_seeds(batch["row_id"], sampling).tolist()
        stops = sorted(self._stops | set(sampling.stop_token_ids))

        def draw(server: Dialect) -> list[Sample]:
            self._refuse_unsupported(server, sampling)  # one that was started again may report other log-probs
            return server.generate(prompts, seeds, sampling, stops)

        with expected_form(self._server.facts.url):
            samples = self._ask(draw) if prompts else []
        self._check_stamps(samples)
        if strings is not None:
            samples = [sample.cut(strings.cut(sample.token_ids)) for sample in samples]
        return build_responses(
            torch.tensor([token for sample in samples for token in sample.token_ids], dtype=torch.int64),
            torch.tensor([logprob for sample in samples for logprob in sample.logprobs], dtype=torch.float32),
            torch.tensor([len(sample.token_ids) for sample in samples], dtype=torch.int64),
            torch.tensor([STOP if sample.is_stopped else LENGTH for sample in samples], dtype=torch.int64),
            n=sampling.n,
            version=self._state.version,
        )

    def release(self) -> int:
        """Frees the KV cache of servers that were started so that they can; 0 bytes where they were not."""
        if self._some_can_release:
            dist.barrier()  # ranks that share a server have their samples
            self._state.is_released = True  # also where some fail: resume asks those that did not
            self._speak("no server was asked again", self._free)
        return self._freed_bytes()

    def resume(self) -> None:
        """Has the servers take the memory of the KV cache again."""
        if self._state.is_released:
            self._speak("no rank generates", self._take_again)
            self._state.is_released = False

    def close(self) -> None:
        """Removes the files. The servers run on, with the weights that they have."""
        self._files.close()

    def _free(self, server: Dialect) -> None:
        """Has the server free its cache, once only: a server of SGLang ends if it is asked twice."""
        if server.facts.can_release and not self._has_freed:
            server.release()
            self._has_freed = True

    def _take_again(self, server: Dialect) -> None:
        if self._has_freed:
            server.resume()
            self._has_freed = False

    def _speak(self, outcome: str, action: Callable[[Dialect], None]) -> None:
        """Does it on one rank of every server, and raises on all what any could not do."""
        with together(outcome), expected_form(self._server.facts.url):
            if self._speaks:
                self._ask(action)

    def _ask(self, action: Callable[[Dialect], Result]) -> Result:
        """Asks the server; one that is gone and is started again in time is asked once more, with the last weights."""
        try:
            return action(self._server)
        except LostServerError as lost:
            self._server = find_again(self._find, self._server.facts, lost, restart_timeout_s=self._restart_timeout_s)
        self._has_freed = False
        if self._server.facts.stamp != self._stamp:
            self._server.load_weights(self._files.folder, self._stamp)
        return action(self._server)

    def _freed_bytes(self) -> int:
        return self._cache_bytes if self._has_freed else 0

    def _refuse_unsupported(self, server: Dialect, sampling: SamplingParams) -> None:
        if problem := server.find_unsupported(sampling):
            raise BackendError(f"{server.facts.name} cannot generate with {sampling}: {problem}")

    def _check_stamps(self, samples: Sequence[Sample]) -> None:
        if foreign := {sample.stamp for sample in samples} - {self._stamp}:
            raise BackendError(
                f"{self._server.facts.name} generated from weights that it calls {sorted(foreign)}, not "
                f"{show(self._stamp)}: it was started again, or somebody else updates it. Give the run servers of its "
                "own and build the backend again"
            )


def _check_restart(restart_timeout_s: float) -> None:
    _check.seconds("rollout.options.restart_timeout_s", restart_timeout_s)
