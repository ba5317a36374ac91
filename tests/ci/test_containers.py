"""The manifest for Kubernetes, and the agent that starts ranks in other containers."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CONTAINERS = Path(__file__).resolve().parents[2] / "ci" / "containers"

yaml = pytest.importorskip("yaml")


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check", CONTAINERS / "check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def manifest(check: ModuleType) -> Any:
    return copy.deepcopy(yaml.safe_load(check.MANIFEST.read_text()))


@pytest.fixture(scope="module")
def schema(check: ModuleType) -> Any:
    return json.loads(check.SCHEMA.read_text())


def faults(check: ModuleType, manifest: Any, schema: Any) -> list[str]:
    return list(check.find_faults(manifest, schema, "MPIJob"))


def test_manifest_agrees_with_the_schema(check: ModuleType, manifest: Any, schema: Any) -> None:
    assert faults(check, manifest, schema) == []
    # Nothing of the part of the schema could be left out.
    assert check.trim(schema, manifest) == schema


def test_wrong_manifests_do_not(check: ModuleType, manifest: Any, schema: Any) -> None:
    worker = manifest["spec"]["mpiReplicaSpecs"]["Worker"]
    worker["replica"] = worker.pop("replicas")
    container = worker["template"]["spec"]["containers"][0]
    container["args"] = "-De"
    container["resources"]["limits"]["cpu"] = True
    del container["name"]
    manifest["spec"]["mpiImplementation"] = "OpenMPI5"
    manifest["spec"]["slotsPerWorker"] = "2"
    assert sorted(one.replace("MPIJob.spec.", "") for one in faults(check, manifest, schema)) == [
        "mpiImplementation: 'OpenMPI5' is none of ['OpenMPI', 'Intel', 'MPICH']",
        "mpiReplicaSpecs.Worker.replica is no field",
        "mpiReplicaSpecs.Worker.template.spec.containers[0].args: '-De' is no array",
        "mpiReplicaSpecs.Worker.template.spec.containers[0].name is missing",
        "mpiReplicaSpecs.Worker.template.spec.containers[0].resources.limits.cpu: True is no integer or string",
        "slotsPerWorker: '2' is no integer",
    ]


def test_workflow_builds_every_image() -> None:
    """The names of images in the workflow are names that build.sh knows, and all MPI libraries are there."""
    workflow = yaml.safe_load((CONTAINERS.parents[1] / ".github" / "workflows" / "containers.yml").read_text())
    script = (CONTAINERS / "build.sh").read_text()
    names = workflow["jobs"]["image"]["strategy"]["matrix"]["mpi"]
    assert f"set -- {' '.join(names)}\n" in script
    stages = (CONTAINERS / "Dockerfile").read_text()
    assert all(f" AS {name}\n" in stages for name in [*names, "job", "tests", "operator", "cuda"])


def test_agent_runs_commands_and_returns_their_status(tmp_path: Path) -> None:
    agent = [sys.executable, str(CONTAINERS / "agent.py")]
    environ = os.environ | {"AGENT_FOLDER": str(tmp_path)}
    host = socket.gethostname()
    # What an earlier job has left starts nothing.
    (tmp_path / host).mkdir()
    (tmp_path / host / "old.command").write_text(f"touch {tmp_path}/old")
    (tmp_path / host / "lock").touch()
    server = subprocess.Popen([*agent, "serve"], env=environ)
    try:
        wanted = f"printf %s $HOME >{tmp_path}/home; exit 7"
        asked = subprocess.run([*agent, host, "true;", wanted], env=environ, timeout=60, check=False)
        assert asked.returncode == 7
        assert (tmp_path / "home").read_text() == os.environ["HOME"]
        assert not (tmp_path / "old").exists()
        waiting = subprocess.Popen([*agent, host, f"touch {tmp_path}/here;", "sleep 30"], env=environ)
        while not (tmp_path / "here").exists():
            assert waiting.poll() is None
    finally:
        server.terminate()
        server.wait(30)
    # Without the agent the command has no end to wait for.
    assert waiting.wait(30) == 255
