"""What launchers write and start: scripts for Slurm, manifests for Kubernetes, actors of Ray, held-back processes."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest

from elastic_train import Controller
from elastic_train.background import can_return, hold_back, let_go
from elastic_train.cli import main
from elastic_train.errors import ElasticError, InputError, JobStateError
from elastic_train.generation import GenerationLog
from elastic_train.launchers.kubernetes import KubernetesJob, kubernetes_manifests
from elastic_train.launchers.manifest import to_yaml
from elastic_train.launchers.ray import RayJob
from elastic_train.launchers.slurm import SlurmJob, slurm_store_script, slurm_worker_script
from elastic_train.launchers.torchrun import find_torchrun
from elastic_train.stores import open_store

NASTY = ["python", "train.py", "--name", "a b'c\"$(touch /tmp/x)", "`id`", "", "\n"]
SRUN = '#!/bin/bash\nshift\nprintf \'%s\\0\' "$@" > "$OUT/arguments"\nenv -0 > "$OUT/environment"\n'


def run_script(script: str, folder, **programs: str) -> None:
    """Check a script's syntax, then run it with stand-ins for some programs."""
    (folder / "job.sbatch").write_text(script)
    subprocess.run(["bash", "-n", str(folder / "job.sbatch")], check=True)
    (folder / "bin").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name.replace("_", "-")).write_text(text)
        (folder / "bin" / name.replace("_", "-")).chmod(0o755)
    place = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "OUT": str(folder)}
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    subprocess.run(["bash", str(folder / "job.sbatch")], check=True, env=os.environ | place | array, timeout=30)


def test_a_member_of_a_slurm_array_gets_its_place_and_its_arguments(tmp_path):
    shared = tmp_path / "with space"
    job = SlurmJob("train", NASTY, str(shared), 2, 8, options=["--gpus-per-task=1"])
    shared.mkdir()
    (shared / "store.address").write_text("tcp://10.0.0.1:7\n")
    script = slurm_worker_script(job)
    run_script(script, tmp_path, srun=SRUN, hostname="#!/bin/bash\necho 10.0.0.9 fe80::1\n")
    assert (tmp_path / "arguments").read_text().split("\0")[:-1] == NASTY
    found = dict(entry.partition("=")[::2] for entry in (tmp_path / "environment").read_text().split("\0"))
    assert found["ELASTIC_TRAIN_STORE"] == "tcp://10.0.0.1:7"
    assert found["ELASTIC_TRAIN_WORKER"] == "s7-3"
    assert (found["ELASTIC_TRAIN_MIN_WORKERS"], found["ELASTIC_TRAIN_MAX_WORKERS"]) == ("2", "8")
    assert found["ELASTIC_TRAIN_INTERFACE"] == "10.0.0.9"
    assert len(found["ELASTIC_TRAIN_TOKEN"]) == 32 == len((shared / "token").read_text())
    assert (shared / "token").stat().st_mode & 0o077 == 0
    for line in ("#SBATCH --array=0-1", "#SBATCH --signal=TERM@120", "#SBATCH --gpus-per-task=1"):
        assert line in script.splitlines()


def test_the_script_of_the_store_serves_it(tmp_path):
    job = SlurmJob("train", ["python", "t.py"], str(tmp_path / "shared"))
    program = '#!/bin/bash\nprintf "%s " "$@" > "$OUT/arguments"\n'
    run_script(slurm_store_script(job), tmp_path, elastic_train=program, hostname="#!/bin/bash\necho 10.0.0.9\n")
    assert (tmp_path / "arguments").read_text() == f"serve --interface 10.0.0.9 --folder {tmp_path}/shared "


def test_manifests_hold_what_a_job_needs():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    job = KubernetesJob("train", NASTY, "registry:5000/train:1", 2, 8, gpus=1, drain_seconds=90)
    service, store, workers = yaml.safe_load_all(kubernetes_manifests(job))
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    assert store["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == store["spec"]["template"]["metadata"]["labels"]
    spec = workers["spec"]
    assert (spec["completionMode"], spec["parallelism"], spec["completions"]) == ("Indexed", 2, 2)
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 90
    (container,) = pod["containers"]
    assert container["command"] == [part.replace("$", "$$") for part in NASTY]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert "scale-in" in container["lifecycle"]["preStop"]["exec"]["command"][-1]
    variables = {entry["name"]: entry for entry in container["env"]}
    assert variables["ELASTIC_TRAIN_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "train-token", "key": "token"}
    assert variables["ELASTIC_TRAIN_STORE"]["value"] == "tcp://train-store.default.svc:7070"
    assert all(isinstance(entry.get("value", ""), str) for entry in container["env"])
    given = KubernetesJob("train", ["t"], "i", store="etcd://e:2379")
    (alone,) = yaml.safe_load_all(kubernetes_manifests(given))
    assert alone["kind"] == "Job"


def test_yaml_is_read_back_as_it_was():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    value = {
        "a": [
            "on",
            "No",
            "1",
            "1e3",
            "~",
            "",
            " x",
            "x ",
            "a: b",
            "# c",
            "- d",
            "é\n",
            "0x1",
            "2026-01-01",
            "plain text",
        ],
        "b": {"c": [{"d": [], "e": {}, "f": [1, 2.5, None, True]}, [["x"]]]},
    }
    assert yaml.safe_load(to_yaml(value)) == value


def test_launch_writes_files(tmp_path, capsys):
    out = ["--out", str(tmp_path / "out")]
    assert main(["launch", "slurm", "--workers", "2:8", "--folder", str(tmp_path), *out, "train.py", "--lr", "1"]) == 0
    assert (
        (tmp_path / "out" / "job-workers.sbatch")
        .read_text()
        .rstrip()
        .endswith("srun --ntasks=1 python train.py --lr 1")
    )
    assert main(["launch", "kubernetes", "--json", "--image", "i", *out, "train.py"]) == 0
    assert (tmp_path / "out" / "job.yaml").exists()
    assert main(["launch", "kubernetes", *out, "train.py"]) == 2
    assert main(["launch", "slurm", "--job", "no good", *out, "train.py"]) == 2
    assert "choose a name such as train-7" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "a\n#SBATCH --x"}, "choose a name"),
        ({"folder": "relative"}, "an absolute path"),
        ({"device": "eth0; id"}, "see ip addr"),
        ({"options": ["--x\n--y"]}, "correct it"),
        ({"command": []}, "name the training script"),
        ({"min_workers": 9, "max_workers": 2}, "between 1 and max_workers=2"),
        ({"drain_seconds": 0}, "at least 1"),
    ],
)
def test_what_could_break_a_script_is_refused(fields, message):
    with pytest.raises(InputError, match=message):
        SlurmJob(**{"name": "train", "command": ["t"], "folder": "/f"} | fields)


class FakeRay(types.ModuleType):
    """The functions of Ray that the launcher uses; actors do nothing until the test lets them end."""

    def __init__(self):
        super().__init__("ray")
        self.options, self.runs, self.killed, self.done = {}, [], [], {}

    def is_initialized(self):
        return bool(self.options)

    def init(self):
        self.options = {"is_up": True}

    def remote(self, *args, **options):
        if args:
            return self._actor_class(args[0])
        self.options |= options
        return self._actor_class

    def _actor_class(self, kind):
        ray = self

        class Run:
            def remote(self, function, environment):
                ray.runs.append((kind, function, environment))
                return environment["ELASTIC_TRAIN_WORKER"]

        class Actor:
            run = Run()

        class ActorClass:
            remote = staticmethod(Actor)

        return ActorClass

    def wait(self, references, num_returns, timeout):
        assert num_returns == len(references)
        assert timeout == 0
        done = [reference for reference in references if reference in self.done]
        return done, [reference for reference in references if reference not in done]

    def get(self, reference):
        if self.done[reference] is not None:
            raise self.done[reference]

    def kill(self, actor):
        self.killed.append(actor)


def test_ray_actors_are_workers(tmp_path, monkeypatch):
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    with RayJob(print, tmp_path, min_workers=2, max_workers=4, resources={"num_gpus": 1}, interface="127.0.0.1") as job:
        assert job.scale_out(2) == ["ray0", "ray1"]
        assert ray.options["num_gpus"] == 1
        kind, function, environment = ray.runs[0]
        assert (kind.__name__, function) == ("WorkerActor", print)
        store = open_store(environment["ELASTIC_TRAIN_STORE"], environment["ELASTIC_TRAIN_TOKEN"])
        GenerationLog(store, "job/generation").propose(1, ("ray0", "ray1"), "", "start")
        job.serve_orders()
        Controller(store, "job").migrate("ray1")
        assert job.serve_orders() == ["ray2"]
        assert store.get("job/replace/ray2").value == {"worker": "ray1"}
        with pytest.raises(JobStateError, match="3 \\+ 2 workers are too many: expected at most 4"):
            job.scale_out(2)
        ray.done = {"ray0": None, "ray1": ValueError("broken"), "ray2": None}
        ended = job.wait(10)
        assert ended["ray0"] is None
        assert isinstance(ended["ray1"], ValueError)
        assert len(ray.killed) == 3
        store.close()


def test_ray_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ElasticError, match="pip install ray, or use LocalJob"):
        RayJob(print, tmp_path)


def test_a_process_is_held_back_and_let_go():
    if not can_return():
        pytest.skip("this user may not leave the idle policy")
    with subprocess.Popen(["sleep", "60"]) as process:
        hold_back(process.pid)
        assert os.sched_getscheduler(process.pid) == os.SCHED_IDLE
        assert let_go(process.pid) == 1
        assert os.sched_getscheduler(process.pid) == os.SCHED_OTHER
        assert let_go(process.pid) == 0
        process.kill()


def test_what_torchrun_says_is_checked():
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "7", "TORCHELASTIC_RUN_ID": "r"}
    assert find_torchrun(place).run == "r-0"
    assert find_torchrun({"RANK": "0"}) is None
    with pytest.raises(InputError, match="start the script with torchrun"):
        find_torchrun(place | {"WORLD_SIZE": "two"})
