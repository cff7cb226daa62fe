"""The facts for a bug report, and whose `dflash-mlx` is installed."""

import importlib.metadata as metadata
import json
from dataclasses import asdict
from types import SimpleNamespace

import mlx.core as mx
import pytest

import dflash_mlx
from dflash_mlx import doctor


def entry(value):
    return metadata.EntryPoint(name="x", value=value, group="console_scripts")


@pytest.fixture
def installed(monkeypatch):
    """Play an installed distribution called dflash-mlx, or none."""

    def install(value, author=None, others=()):
        def find(name):
            if value is None:
                raise metadata.PackageNotFoundError(name)
            details = SimpleNamespace(json={"author": author} if author else {"summary": "a summary"})
            return SimpleNamespace(version="0.1.8", entry_points=[entry(value)], metadata=details)

        monkeypatch.setattr(metadata, "distribution", find)
        monkeypatch.setattr(metadata, "packages_distributions", lambda: {"dflash_mlx": ["dflash-mlx", *others]})

    return install


def test_the_report_states_versions_device_memory_and_default_pair_and_is_json():
    report = doctor.report()
    assert report.version == dflash_mlx.__version__
    assert report.packages["mlx"] == metadata.version("mlx") and report.packages["mlx-lm"] == metadata.version("mlx-lm")
    assert report.device.startswith(mx.default_device().type.name)
    assert 0 < report.memory.usable <= report.memory.total and report.cache_free_bytes > 0
    assert report.default_pair.startswith("pair: ")
    assert json.loads(json.dumps(asdict(report)))["module"] == report.module


def test_our_own_distribution_is_recognised(installed):
    installed("dflash_mlx.cli.main:main")
    assert doctor.owner() == ("dflash-mlx 0.1.8, this project", ())


def test_another_project_under_our_name_is_named(installed):
    installed("dflash_mlx.cli:main", author="someone")
    named, warnings = doctor.owner()
    assert named == "dflash-mlx 0.1.8, another project (someone)"
    assert len(warnings) == 1 and "uninstall it" in warnings[0]
    installed("dflash_mlx.cli:main")
    assert doctor.owner()[0].endswith("another project (a summary)")


def test_another_distribution_with_our_module_is_a_warning(installed):
    installed("dflash_mlx.cli.main:main", others=["dflash-fork"])
    assert doctor.owner()[1] == ("the distribution dflash-fork also installs a module dflash_mlx; uninstall it",)


def test_no_distribution_at_all_is_said(installed):
    installed(None)
    assert doctor.owner() == ("not installed; run from a folder", ())


def test_the_real_installation_is_ours():
    assert doctor.owner()[0].endswith("this project")


def test_a_missing_compiler_is_a_warning_on_a_cpu_only(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: None)
    warned = any("g++" in warning for warning in doctor.report().warnings)
    assert warned == (mx.default_device() == mx.Device(mx.cpu))
