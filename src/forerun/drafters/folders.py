"""What kind of drafter a folder holds."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from forerun.drafters import DRAFTERS
from forerun.drafters.base import DrafterSpec
from forerun.drafters.model import ModelDraft
from forerun.errors import ModelError
from forerun.registry import Spec
from forerun.runtime import gguf
from forerun.runtime.drafts import ABOUT, read_about
from forerun.runtime.head_file import CONFIG, FLAGS
from forerun.runtime.load import header, read_json

KNOWN = (
    "a model (a folder of transformers, or a GGUF file), what forerun train-draft makes, and "
    "EAGLE-3 heads (of speculators, or in their authors' layout)"
)
BLOCK = "it fills a block of masks in one pass, which is not run here"
REFUSED = {
    "dflash": f"a DFlash head: {BLOCK}",
    "dflash2": f"a DFlash head: {BLOCK}",
    "dspark": f"a DSpark head: {BLOCK}",
    "peagle": f"a P-EAGLE head: {BLOCK}",
    "eagle": "a head of EAGLE 1 or 2, which reads the last state only; EAGLE-3's are read",
    "mtp": "layers for MTP outside their model; the target's own are run by mtp",
    "mlp": "an MLP speculator, which is not run here",
    "medusa": "Medusa's own heads; forerun train-draft medusa makes ones that are read",
}
"""Heads that others publish and that are not run here, by their names, and why."""


class Contents(NamedTuple):
    """What a folder or a file that is named as a draft holds."""

    spec: DrafterSpec  # the drafter
    about: str  # what it is, in a few words


def contents_of(path: str) -> Contents:
    """What a folder or a file holds, by its configuration alone.

    Raises:
        ModelError: nothing that can draft here; the kinds that can are named.
    """
    folder = Path(path).expanduser()
    if (folder / ABOUT).is_file():
        kind = read_about(path).kind
        named = ("specbound", (), {"exits": path}) if kind == "exits" else (kind, (path,), {})
        if named[0] not in DRAFTERS:
            raise _refused(path, kind)
        return Contents(DRAFTERS.make(Spec(*named)), f"trained by forerun for {named[0]}")
    if gguf.locate(path) is not None:
        return Contents(ModelDraft(path), "a GGUF model")
    if not (folder / CONFIG).is_file():
        raise ModelError(
            f"{path!r} holds no draft: neither {CONFIG} nor {ABOUT} is there; a draft is {KNOWN}"
        )
    config = read_json(folder / CONFIG)
    layout = config.get("speculators_model_type")
    kind = str(layout or _published(config, folder))
    if kind == "eagle3":
        whose = "of speculators" if layout else "in its authors' layout"
        return Contents(DRAFTERS.make(Spec("eagle3", (path,), {})), f"an EAGLE-3 head {whose}")
    if kind:
        raise _refused(path, kind)
    return Contents(ModelDraft(path), f"a {config.get('model_type', 'transformers')} model")


def _refused(path: str, kind: str) -> ModelError:
    reason = REFUSED.get(kind, f"a head of the kind {kind!r}, which is not known here")
    return ModelError(f"{path!r} holds {reason}; a draft is {KNOWN}")


def _published(config: Mapping[str, Any], folder: Path) -> str:
    """The kind of a head that is not of speculators; empty: it is none."""
    architecture = " ".join(map(str, config.get("architectures") or ())).lower()
    if "mlpspeculator" in architecture:
        return "mlp"
    for kind in ("dflash", "dspark", "peagle", "medusa", "hydra"):
        if kind in architecture or any(key.startswith(kind) for key in config):
            return kind
    if "eagle3" in architecture or any(key in config for key in ("draft_vocab_size", *FLAGS)):
        return "eagle3"
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with suppress(OSError, ModelError):
            names |= header(file).keys()
    if any(name.startswith("midlayer.") for name in names):
        return "eagle3"
    return "eagle" if "eagle" in architecture or "fc.weight" in names else ""
