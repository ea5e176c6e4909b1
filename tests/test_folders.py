"""One door for drafts: what a folder holds is told by its configuration, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from forerun.drafters import DRAFTERS
from forerun.drafters.folders import contents_of
from forerun.errors import ModelError
from forerun.model import drafter_spec
from forerun.runtime.drafts import About, save_draft
from tiny import build

EAGLE3 = Path(__file__).parent / "data" / "eagle3" / "llama"


def folder(path: Path, config: dict[str, Any], *tensors: str) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if tensors:
        save_file({name: torch.ones(1) for name in tensors}, path / "model.safetensors")
    return str(path)


@pytest.mark.parametrize("kind", ["shared", "block", "kangaroo", "medusa", "exits", "eagle"])
def test_drafts_of_forerun(kind: str, tmp_path: Path) -> None:
    save_draft(tmp_path, About(kind, None), {"x": torch.ones(1)})
    name = {"exits": "specbound"}.get(kind, kind)
    held = contents_of(str(tmp_path))
    assert held.about == f"trained by forerun for {name}"
    assert type(held.spec).__module__ == f"forerun.drafters.{name}"
    assert drafter_spec(tmp_path) == held.spec


def test_models_and_published_heads(tmp_path: Path) -> None:
    build("qwen2").save_pretrained(tmp_path / "model")
    for path, about, module in (
        (str(tmp_path / "model"), "a qwen2 model", "model"),
        (str(EAGLE3), "an EAGLE-3 head of speculators", "eagle3"),
        (folder(tmp_path / "a", {"model_type": "llama", "draft_vocab_size": 9}),
         "an EAGLE-3 head in its authors' layout", "eagle3"),
        (folder(tmp_path / "b", {"model_type": "llama"}, "midlayer.hidden_norm.weight"),
         "an EAGLE-3 head in its authors' layout", "eagle3"),
    ):  # fmt: skip
        held = contents_of(path)
        assert held.about == about
        assert type(held.spec).__module__ == f"forerun.drafters.{module}"


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"speculators_model_type": "dflash"}, (), "holds a DFlash head: it fills a block"),
        ({"architectures": ["DFlashDraftModel"]}, (), "holds a DFlash head"),
        ({"speculators_model_type": "peagle"}, (), "holds a P-EAGLE head"),
        ({"speculators_model_type": "mtp"}, (), "the target's own are run by mtp"),
        ({"speculators_model_type": "hydra"}, (), "a head of the kind 'hydra', which is not known"),
        ({"medusa_num_heads": 5}, (), "Medusa's own heads; forerun train-draft medusa"),
        ({"hydra_num_heads": 4}, (), "a head of the kind 'hydra', which is not known"),
        ({"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"]}, (),
         "an MLP speculator"),
        ({"model_type": "llama"}, ("fc.weight", "layers.0.mlp.up_proj.weight"),
         "a head of EAGLE 1 or 2"),
    ],
)  # fmt: skip
def test_other_heads_are_refused_by_name(
    config: dict[str, Any], tensors: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    path = folder(tmp_path / "head", config, *tensors)
    with pytest.raises(ModelError, match=message) as caught:
        drafter_spec(path)
    assert "a draft is a model (a folder of transformers, or a GGUF file)" in str(caught.value)


def test_a_draft_of_a_kind_that_is_not_known_is_refused(tmp_path: Path) -> None:
    save_draft(tmp_path, About("hydra", None), {"x": torch.ones(1)})
    with pytest.raises(ModelError, match=r"the kind 'hydra', which is not known here; a draft is"):
        drafter_spec(tmp_path)


def test_a_head_in_several_files_is_told(tmp_path: Path) -> None:
    path = folder(tmp_path, {"model_type": "llama"}, "midlayer.hidden_norm.weight")
    save_file({"lm_head.weight": torch.ones(1)}, tmp_path / "more.safetensors")
    assert contents_of(path).about == "an EAGLE-3 head in its authors' layout"


def test_a_folder_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither config\.json nor draft\.json is there"):
        drafter_spec(tmp_path)


def test_a_folder_of_a_drafters_name_hides_it_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_draft(Path("medusa"), About("medusa", None), {"x": torch.ones(1)})
    own = drafter_spec("./medusa")
    assert (own, drafter_spec(Path("medusa"))) == (
        contents_of("./medusa").spec,
        contents_of("medusa").spec,
    )
    Path("memory").mkdir()
    assert drafter_spec("memory") == DRAFTERS.make("memory")
    assert drafter_spec("memory+./medusa").then == own
