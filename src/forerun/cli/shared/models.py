"""Models as options name them, and what is run with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from forerun.cli.shared import options
from forerun.cli.shared.console import remark, status
from forerun.cli.shared.options import MODELS, PROMPTS, SPECULATION
from forerun.controllers import CONTROLLERS, Controller
from forerun.errors import ForerunWarning, SettingError, require
from forerun.prompts import Prompt, Reader, at
from forerun.requests import Sampling
from forerun.settings import Settings, resolve

if TYPE_CHECKING:
    from forerun import Model
    from forerun.rules import AcceptanceRule

ALONE = ("target", "device", "dtype", "trust_remote_code")  # options without a drafter


@dataclass(frozen=True)
class Chat:
    """What is put around prompts.

    Args:
        chat: prompts are what a user says: put the model's chat template around.
        system: what the system says before, in the chat template.
    """

    panel: ClassVar[str] = PROMPTS
    chat: bool = False
    system: str | None = None

    @property
    def wrap(self) -> bool | None:
        """As `Reader` takes it."""
        return self.chat or self.system is not None

    @property
    def key(self) -> str:
        """What it adds to the name of texts that are kept."""
        return f" {self.wrap} {self.system}" if self.wrap else ""


@dataclass(frozen=True)
class ChatByDefault(Chat):
    """What is put around prompts, where the model itself says whether a template is.

    Args:
        raw: leave the chat template out, which is around prompts of models that are made to answer.
    """

    raw: bool = False

    @property
    def wrap(self) -> bool | None:
        if self.raw and super().wrap:
            raise SettingError("--raw leaves the chat template out; leave --chat and --system out")
        return False if self.raw else super().wrap or None


@dataclass(frozen=True)
class Job:
    """A model, and how its prompts are run."""

    model: Model
    controller: Controller
    rule: AcceptanceRule
    batch_size: int = 16
    about: dict[str, Any] = field(default_factory=dict)  # settings as reported in the JSON document
    logprobs: int | None = None
    first_token_soon: bool = False  # as for `Model.stream`
    chat: Chat = Chat()  # what is put around prompts

    @property
    def reader(self) -> Reader:
        return Reader.of(self.model, self.chat.wrap, self.chat.system)


@dataclass(frozen=True)
class PolicyOptions:
    """What decides how far a command runs ahead and what it keeps.

    Args:
        controller (SPEC): how far to run ahead, like gammatune(eta=0.3); default: auto.
        rule (SPEC): what to keep, forerun list rules says which are lossless; default: gumbel.
        settings (FILE): controller, rule and draft of a file of forerun tune, where no option names
            one.
    """

    panel: ClassVar[str] = SPECULATION
    controller: str | None = None
    rule: str | None = None
    settings: str | None = None
    remember: options.Remember = None

    def resolve(self, draft: str | None = None) -> Settings:
        """Controller, rule and draft in force: those named, else those of the file."""
        return resolve(self.settings, controller=self.controller, rule=self.rule, draft=draft)


@dataclass(frozen=True)
class Models:
    """What is to be loaded: the options that `forerun.load` takes.

    Args:
        target (ID_OR_PATH): a folder, a Hugging Face id, or translator or digest, which ship;
            default: the shipped one.
        draft (ID_OR_PATH|SPEC): who runs ahead, a smaller model, a folder with a trained draft or a
            published EAGLE-3 head, or a drafter like lookup(n=3), mtp or none; default: the shipped
            draft for the shipped target, shared or block where the target's folder has one, else
            memory, with a head behind it (memory+eagle) where there is one.
        runtime (SPEC): what runs the models: torch, openvino, cudagraphs, auto, or e.g.
            "openvino(precision='int8')"; default: FORERUN_RUNTIME, or else auto (openvino on a CPU
            where it is installed and serves the model), torch for specbound, adadecode, kangaroo.
        device (D): where they run: cpu, cuda, cuda:1, ...; default: a GPU if any.
        dtype (T): of their weights: auto, float32, bfloat16 or float16; default: as they were
            saved.
        trust_remote_code: run code that comes with a checkpoint.
    """

    panel: ClassVar[str] = MODELS
    target: str | None = None
    draft: str | None = None
    runtime: str | None = None
    device: str | None = None
    dtype: str | None = None
    trust_remote_code: bool = False

    @property
    def alone(self) -> Models:
        """The target and no drafter, on torch."""
        return replace(self, draft="none", runtime="torch")

    def writer(self, model: Model) -> Model:
        """The target where it writes its own texts: on its default runtime, as `forerun write` has
        it, unless that is torch, on which it is here."""
        from forerun.runtime.runtimes import default_runtime

        runtime = default_runtime()
        fast = find_spec("openvino") is not None and model.target.device.type == "cpu"
        if runtime == "torch" or (runtime == "auto" and not fast):
            return model
        return replace(self, draft="none").load().model

    def load(self, how: Settings | None = None, batch_size: int = 16, **more: Any) -> Job:
        """Check everything, then load the models; arguments as for `open`."""
        return self.open((), None, how, batch_size, **more)[0]

    def open(
        self,
        prompts: Sequence[Prompt],
        common: Mapping[str, Any] | None = None,
        how: Settings | None = None,
        batch_size: int = 16,
        *,
        chat: Chat | None = None,
        remember: bool = False,
        **reading: bool,
    ) -> tuple[Job, list[Prompt]]:
        """Load the models, and prepare the prompts, whose settings are checked before.
        `common` are sampling fields for all, `how` names controller, rule, and a draft where no
        option does, and `reading` is as for `Reader.prepare`."""
        from forerun.rules import RULES

        chat = chat or Chat()
        with status(f"loading {self.target or 'the models that ship'}"), quiet():
            require(batch_size >= 1, "batch size", batch_size, "≥ 1")
            length, keep = self._check(how)
            wrap = chat.wrap
            for prompt in prompts:
                with at(prompt.where):
                    Sampling.of({**(common or {}), **prompt.settings})
            named = None if how is None else how.draft
            model, draft = self._load(self.draft or named, remember)
            about = {
                "target": self.target or "shipped",
                "draft": draft,
                "controller": CONTROLLERS.text(length),
                "rule": RULES.text(keep),
                "lossless": keep.lossless,
                "batch_size": batch_size,
                "device": str(model.target.device),
                "dtype": model.target.facts.precision,
                "runtime": model.target.facts.executor,
            }
            job = Job(model, length, keep, batch_size, about, chat=chat)
            ready = Reader.of(model, wrap, chat.system).prepare(prompts, common, **reading)
            about["chat"] = any(p.chat for p in ready)
            return job, ready

    def _check(self, how: Settings | None) -> tuple[Controller, AcceptanceRule]:
        """Errors that need no model are raised before one is loaded."""
        from forerun.model import DEFAULT_CONTROLLER, DEFAULT_RULE
        from forerun.rules import RULES
        from forerun.runtime.load import resolve_device, resolve_dtype
        from forerun.runtime.runtimes import RUNTIMES, default_runtime

        length = CONTROLLERS.make((how and how.controller) or DEFAULT_CONTROLLER)
        keep = RULES.make((how and how.rule) or DEFAULT_RULE)
        RUNTIMES.make(self.runtime or default_runtime())
        resolve_device(self.device)
        resolve_dtype(self.dtype)
        return length, keep

    def _load(self, draft: str | None, remember: bool) -> tuple[Model, str]:
        """The model, and the name of who runs ahead of it."""
        from forerun.drafters import DRAFTERS
        from forerun.drafters.folders import contents_of
        from forerun.drafters.model import ModelDraft
        from forerun.model import default_draft, drafter_spec, load

        chosen = draft or default_draft(self.target)
        spec = drafter_spec(chosen)
        model = load(
            self.target,
            spec.remembering() if remember else spec,
            runtime=self.runtime,
            device=self.device,
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
        )
        named = draft is not None and draft not in DRAFTERS and Path(draft).exists()
        if named and not isinstance(spec, ModelDraft):
            remark(f"{draft}: {contents_of(str(draft)).about}")
        return model, draft or ("shipped" if self.target is None else str(chosen))


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the libraries' own messages off the terminal; ours come as lines at the end."""
    import warnings

    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    logging.set_verbosity_error()
    hub.set_verbosity_error()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", ForerunWarning)
        yield
    for warning in caught:
        remark(str(warning.message))
