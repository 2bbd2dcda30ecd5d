"""Wrong calls and their messages: each holds the offending name, the value and what to do about it."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

import elastic_train
from elastic_train import Controller, ElasticDataLoader, ShardQueue, State, session
from elastic_train.adaptation import AdaScale, BatchSchedule, FollowThroughput, GrowWithNoise, Legw, adapt
from elastic_train.errors import (
    ElasticError,
    FencedError,
    InputError,
    JobStateError,
    StateMismatchError,
    StoreError,
)
from elastic_train.generation import GenerationLog
from elastic_train.launchers import LocalJob
from elastic_train.scheduler import Cluster, Workload, policy, read_philly, read_tiresias, simulate
from elastic_train.scheduler.policies import ProbabilisticLending, Tiresias
from elastic_train.shards import BinaryRecords, Iterables, TextLines
from elastic_train.snapshots import LocalState
from elastic_train.stores import FileStore, MemoryStore, open_store


def workload(times=(0.0,), requested=2, widest=4):
    ones = np.ones(len(times), dtype=np.int64)
    curves = np.arange(widest + 1.0)[None]
    return Workload(np.array(times), 100.0 * ones, requested * ones, ones, requested * ones, 0 * ones, curves, 0 * ones)


def with_job(folder, call, **settings):
    elastic_train.init(f"file://{folder}", "job", worker_id="w7", **settings)
    call()


def step_outside(folder):
    elastic_train.init(f"file://{folder}", "job")
    model = elastic_train.wrap(torch.nn.Linear(1, 1))
    elastic_train.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1)).step()


def train_badly(has_step):
    """Train two steps without the calls that end them."""
    job = elastic_train.init("memory:", "job", worker_id="w7")
    try:
        model = elastic_train.wrap(torch.nn.Linear(1, 1))
        optimizer = elastic_train.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        State(model=model, optimizer=optimizer)
        for x in ElasticDataLoader(torch.ones(8, 1), 2):
            model(x).sum().backward()
            if has_step:
                optimizer.step()
    finally:
        job.agent.close()


def train_once(make_model, clip=None, scaler=None):
    """Train one step of a job with one worker."""
    job = elastic_train.init("memory:", "job", worker_id="w7")
    try:
        model = elastic_train.wrap(make_model())
        optimizer = elastic_train.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        State(model=model, optimizer=optimizer)
        for x in ElasticDataLoader(torch.ones(2, 1), 2):
            loss = model(x.long() if clip is None and scaler is None else x).sum()
            (scaler.scale(loss) if scaler else loss).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer) if scaler else optimizer.step()
    finally:
        job.agent.close()


def make_transposed():
    linear = torch.nn.Linear(2, 2)
    linear.weight = torch.nn.Parameter(torch.ones(2, 2).t())
    return linear


class Stubborn:
    """An object that gives a state and takes none."""

    def state_dict(self):
        return {"ticks": 1}

    def load_state_dict(self, state):
        raise KeyError("tocks")


def restore_badly(_):
    state = State(clock=Stubborn())
    state.restore(*state.capture())


def read_tiresias_rows(folder, *rows):
    path = folder / "jobs.csv"
    path.write_text("\n".join(["job_id,num_gpu,submit_time,duration", *rows]))
    read_tiresias(path)


def controller():
    store = MemoryStore()
    GenerationLog(store, "job/generation").propose(1, ("a", "b"), "", "start")
    return Controller(store, "job")


def propose_as_an_old_leader():
    log = GenerationLog(MemoryStore(), "job/generation")
    log.propose(5, ("a",), "", "start")
    log.propose(3, ("b",), "", "start")


def join_under_a_taken_id(folder):
    store = open_store(f"file://{folder}")
    store.put("job/member/a", {})
    store.close()
    elastic_train.init(f"file://{folder}", "job", worker_id="a")


def open_a_file_as_a_folder(folder):
    (folder / "plain").write_text("")
    FileStore(folder / "plain")


def read_another_format(folder):
    (folder / "jobs.csv").write_text("name,seconds\nx,1\n")
    read_philly(folder / "jobs.csv")


# What is wrong: (the call on an empty folder, its error, and parts of the message: name, value, remedy).
WRONG_CALLS = {
    "store": (lambda _: open_store("redis://h"), InputError, ("store=", "'redis://h'", "correct the address")),
    "store in a plain file": (
        open_a_file_as_a_folder, StoreError, ("store", "plain/store.sqlite", "name another folder")),
    "no store": (
        lambda _: elastic_train.init(job_id="job"), InputError, ("store=", "None", "elastic-train run")),
    "no job id": (
        lambda f: elastic_train.init(f"file://{f}"), InputError, ("job_id=", "None", "elastic-train run")),
    "limits of workers": (
        lambda f: elastic_train.init(f"file://{f}", "job", min_workers=3, max_workers=2), InputError,
        ("min_workers=", "3", "correct the limits", "host node-1, worker w7, no rank yet, phase init")),
    "logical workers": (
        lambda f: elastic_train.init(f"file://{f}", "job", min_workers=3, logical_workers=2), InputError,
        ("logical_workers=", "2", "at least min_workers=3", "multiple")),
    "straggler": (
        lambda f: elastic_train.init(f"file://{f}", "job", straggler_ratio=0.5), InputError,
        ("straggler_ratio=", "0.5", "use 1.2")),
    "store that nobody serves": (
        lambda f: elastic_train.init("tcp://127.0.0.1:9", "job", token="t"), StoreError,
        ("tcp://127.0.0.1:9", "expected a store server", "check address", "host node-1", "phase opening the store")),
    "token": (lambda _: open_store("tcp://h:1"), InputError, ("token=", "None", "ELASTIC_TRAIN_TOKEN")),
    "address without a port": (
        lambda _: open_store("tcp://h", "t"), StoreError, ("'h'", "expected HOST:PORT", "correct it")),
    "worker id that is taken": (
        join_under_a_taken_id, JobStateError, ("worker id", "'a'", "pass another worker_id", "phase joining")),
    "no job yet": (lambda _: elastic_train.current_job(), InputError, ("job", "elastic_train.init", "call it first")),
    "nothing to start": (lambda f: LocalJob([], f), InputError, ("command=", "[]", "name the training script")),
    "limits of a launcher": (
        lambda f: LocalJob(["train.py"], f, min_workers=0), InputError, ("min_workers=", "0", "max_workers=64")),
    "too many workers": (
        lambda f: LocalJob(["train.py"], f, max_workers=2).scale_out(3), JobStateError,
        ("0 + 3 workers", "at most 2", "start fewer")),
    "leave of a stranger": (
        lambda _: controller().scale_in(["z"]), JobStateError, ("workers", "['z']", "name others")),
    "leave of everybody": (
        lambda _: controller().scale_in(["a", "b"]), InputError, ("workers=", "['a', 'b']", "leave one at work")),
    "old leader": (
        lambda _: propose_as_an_old_leader(), FencedError,
        ("epoch 3", "at least 5", "stop leading", "host node-1", "proposing")),
    "state without a state": (
        lambda _: State(model=torch.nn.Linear(1, 1), rate=0.1), InputError, ("rate=", "0.1", "leave it out")),
    "no samples": (
        lambda _: ElasticDataLoader([], 8), InputError, ("dataset=", "[]", "give it __len__", "ShardQueue")),
    "an iterable as a dataset": (
        lambda _: ElasticDataLoader(iter("ab"), 8), InputError, ("dataset=", "map-style", "ShardQueue for files")),
    "no epochs": (
        lambda _: ElasticDataLoader([1], 8, num_epochs=0), InputError, ("num_epochs=", "0", "passes over the data")),
    "no shards": (lambda _: ShardQueue([], TextLines()), InputError, ("shards=", "[]", "see that the paths match")),
    "a path instead of shards": (
        lambda _: ShardQueue("data.txt", TextLines()), InputError, ("shards=", "'data.txt'", "into a list")),
    "no reader": (lambda _: ShardQueue(["a"], open), InputError, ("reader=", "is_exact", "take TextLines()")),
    "no streams": (
        lambda _: ShardQueue(["a"], TextLines(), num_streams=0), InputError, ("num_streams=", "0", "leave it out")),
    "more streams than samples": (
        lambda f: with_job(f, lambda: ElasticDataLoader(ShardQueue([1, 2], Iterables(list), 9), 8)), InputError,
        ("num_streams=", "9", "global_batch_size=8", "use fewer streams")),
    "streams that are no logical workers": (
        lambda f: with_job(
            f, lambda: ElasticDataLoader(ShardQueue([1, 2], Iterables(list), 2), 8), logical_workers=4),
        InputError, ("num_streams=", "2", "logical_workers=4", "leave it out")),
    "two loaders": (
        lambda f: with_job(f, lambda: [ElasticDataLoader([1], 8), ElasticDataLoader([1], 8)]), InputError,
        ("part 'data'", "expected one of a kind", "make it once")),
    "size of a record": (lambda _: BinaryRecords(0), InputError, ("record_bytes=", "0", "bytes of one record")),
    "size of a part": (
        lambda _: TextLines().split([__file__], 0), InputError, ("shard_bytes=", "0", "size of a shard")),
    "an iterable instead of its maker": (lambda _: Iterables([1]), InputError, ("make=", "[1]", "pass the function")),
    "steps between checkpoints": (
        lambda f: elastic_train.init(f"file://{f}", "job", checkpoint=f, checkpoint_every=0), InputError,
        ("checkpoint_every=", "0", "use for example 100", "phase init")),
    "no checkpoints to keep": (
        lambda f: elastic_train.init(f"file://{f}", "job", checkpoint=f, checkpoint_keep=0), InputError,
        ("checkpoint_keep=", "0", "keep 2")),
    "checkpoints in a plain file": (
        lambda _: elastic_train.init("memory:", "job", checkpoint=__file__), InputError,
        ("checkpoint=", "test_wrong_calls.py", "name another folder")),
    "adaptation without a loader": (
        lambda f: with_job(f, lambda: adapt(BatchSchedule({2: 8}))), InputError,
        ("global_batch_size=", "0", "make the loader before")),
    "no policy": (
        lambda f: with_job(f, lambda: [ElasticDataLoader([1], 8), adapt("grow")]), InputError,
        ("policies=", "'grow'", "derive from Policy")),
    "rule of learning rates": (
        lambda f: with_job(f, lambda: [ElasticDataLoader([1], 8), adapt(learning_rate="cubic")]), InputError,
        ("learning_rate=", "'cubic'", "'linear', 'sqrt'", "choose one of them")),
    "schedule of sizes": (lambda _: BatchSchedule({3: 0}), InputError, ("sizes=", "{3: 0}", "write {step: size}")),
    "sizes that follow noise": (
        lambda _: GrowWithNoise(8, multiple=16), InputError, ("max_batch_size", "(8, 100, 16)", "correct them")),
    "worth of a worker": (
        lambda _: FollowThroughput(4, min_efficiency=2.0), InputError, ("min_efficiency", "2.0", "correct them")),
    "warm-up": (lambda _: Legw(0), InputError, ("warm_up_samples=", "0", "per cent of an epoch")),
    "power": (lambda _: AdaScale(3.0), InputError, ("power=", "3.0", "0.5 for Adam")),
    "nothing to keep": (lambda _: LocalState(), InputError, ("objects=", "{}", "RandomState()")),
    "an own state without a state": (
        lambda _: LocalState(rate=0.1), InputError, ("rate=", "0.1", "leave it out")),
    "notify_batch_end forgotten": (
        lambda _: train_badly(has_step=True), ElasticError,
        ("step 1 was not ended", "expected notify_batch_end() after each", "add the call", "worker w7, rank 0")),
    "step of another optimizer": (
        lambda _: train_badly(has_step=False), ElasticError,
        ("the batch of step 0 was not voted on", "step() of elastic_train.Optimizer", "wrap the optimizer", "rank 0")),
    "a parameter that cannot be sent": (
        lambda _: train_once(make_transposed), InputError, ("model.weight=", "(1, 2)", "store it contiguously")),
    "a job that is not there": (
        lambda folder: Controller.of_job(f"file://{folder}", "jbo"), JobStateError,
        ("no job 'jbo'", "expected one of []", "name it with --job")),
    "a store that is not there": (
        lambda folder: Controller.of_job(f"file://{folder}/jbo", "job"), InputError,
        ("/jbo'", "the folder of a job's store", "correct the address")),
    "an object that cannot take its state": (
        restore_badly, StateMismatchError, ("'clock' cannot take the state", "KeyError", "correct that object")),
    "gradients clipped before they are summed": (
        lambda _: train_once(lambda: torch.nn.Linear(1, 1), clip=0.1), InputError,
        ("gradients=", "changed between backward() and step()", "clip or unscale in elastic_train.Optimizer")),
    "gradients unscaled before they are summed": (
        lambda _: train_once(lambda: torch.nn.Linear(1, 1), scaler=torch.amp.GradScaler("cpu")), InputError,
        ("GradScaler", "elastic_train.Optimizer", "scaler.step(inner), scaler.update()")),
    "sparse gradients": (
        lambda _: train_once(lambda: torch.nn.Embedding(2, 3, sparse=True)), InputError,
        ("shape (2, 3)", "torch.sparse_coo", "use sparse=False")),
    "a step outside of a batch": (step_outside, InputError, ("step()", "ElasticDataLoader", "take batches from one")),
    "no batch": (
        lambda _: ElasticDataLoader([1], 0), InputError, ("global_batch_size=", "0", "pass the samples of one step")),
    "policy": (lambda _: policy("best"), InputError, ("policy=", "'best'", "choose one of them")),
    "thresholds": (
        lambda _: Tiresias(thresholds_gpu_seconds=(9.0, 3.0)), InputError,
        ("thresholds_gpu_seconds=", "(9.0, 3.0)", "sort them")),
    "risk": (lambda _: ProbabilisticLending([4], risk=0.9), InputError, ("risk=", "0.9", "use 0.02")),
    "cluster": (lambda _: Cluster(0), InputError, ("cluster=", "num_gpus=0", "correct the cluster")),
    "job wider than the cluster": (
        lambda _: simulate(workload(), policy("fifo"), Cluster(1)), InputError, ("job 0=", "2", "enlarge the cluster")),
    "times without an end": (
        lambda _: workload((0.0, float("nan"))), InputError, ("submit_seconds of job 1=", "nan", "correct the job")),
    "trace with a word for a number": (
        lambda folder: read_tiresias_rows(folder, "a,x,0,5"), InputError,
        ("jobs.csv, line 2=", "{'num_gpu': 'x'}", "correct the line")),
    "trace with a negative duration": (
        lambda folder: read_tiresias_rows(folder, "a,1,0,-5"), InputError,
        ("jobs.csv, line 2=", "{'duration': '-5'}", "correct the line")),
    "trace without jobs": (
        lambda folder: read_tiresias_rows(folder), InputError, ("jobs.csv=", "no rows", "check the file")),
    "unsorted jobs": (
        lambda _: workload((5.0, 1.0)), InputError, ("submit_seconds=", "1.0 after 5.0", "sort the jobs")),
    "limits of a job": (
        lambda _: workload(requested=9), InputError, ("min, requested, max=", "(1, 9, 9)", "correct the job's limits")),
    "load": (lambda _: workload().at_load(0), InputError, ("factor=", "0", "use 1.0")),
    "trace of another format": (
        read_another_format, InputError, ("jobs.csv", "['name', 'seconds']", "name the right format")),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "parts"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_message_holds_name_value_and_remedy(call, error, parts, monkeypatch):
    for name in ("STORE", "JOB", "TOKEN"):
        monkeypatch.delenv(f"ELASTIC_TRAIN_{name}", raising=False)
    monkeypatch.setattr(session, "_job", None)
    monkeypatch.setattr(session.signal, "signal", lambda *_: None)
    monkeypatch.setattr(socket, "gethostname", lambda: "node-1")
    monkeypatch.setenv("ELASTIC_TRAIN_WORKER", "w7")
    with tempfile.TemporaryDirectory() as folder, pytest.raises(error) as caught:
        call(Path(folder))
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)
