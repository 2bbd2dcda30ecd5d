"""State of a worker's own: it outlives its worker, and a step that is done again begins where it began."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from elastic_train.generation import Generation
from elastic_train.group import connect, serve_rendezvous
from elastic_train.snapshots import LocalState, RandomState


class Value:
    """A number with a state."""

    def __init__(self, number):
        self.number = number

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


class Worker:
    def __init__(self, name):
        self.value, self.events = Value(name), []
        self.job = SimpleNamespace(
            step=0, links=None, add_part=lambda name, part: None,
            events=SimpleNamespace(write=lambda event, **fields: self.events.append((event, fields))),
        )  # fmt: skip
        self.local = LocalState(self.job, value=self.value)

    def enter(self, links):
        self.job.links = links
        self.local.entered(links)

    def step(self, change):
        self.value.number = change(self.value.number)
        self.job.step += 1
        self.local.updated()


def in_generation(workers, number, action):
    """Connect workers in threads and let each do something."""
    server, address = serve_rendezvous()
    names = tuple(workers)
    generation = Generation(number, 1, names, address)
    with ThreadPoolExecutor(len(names)) as pool:
        running = [
            pool.submit(lambda name=name: action(workers[name], connect(generation, name, timeout_seconds=30)))
            for name in names
        ]
        for future in running:
            future.result()
    del server


@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_newcomer_takes_over_what_a_lost_worker_had(num_steps):
    workers = {name: Worker(name) for name in "abc"}

    def train(worker, links):
        worker.enter(links)
        for _ in range(num_steps):
            worker.step(lambda value: value + "+")

    in_generation(workers, 1, train)
    del workers["b"]
    for worker in workers.values():
        worker.value.number = "of a step that failed"
    in_generation(workers, 2, lambda worker, links: worker.enter(links))
    assert [worker.value.number for worker in workers.values()] == ["a" + "+" * num_steps, "c" + "+" * num_steps]
    workers["d"] = Worker("d")
    in_generation(workers, 3, train)
    assert workers["d"].local.inherited == ("b", num_steps)
    assert workers["d"].value.number == "b" + "+" * 2 * num_steps
    assert workers["d"].events == [("inherited", {"of": "b", "step": num_steps})]
    workers["e"] = Worker("e")
    in_generation(workers, 4, train)
    assert workers["e"].local.inherited is None
    assert workers["e"].value.number == "e" + "+" * num_steps


def test_a_lone_survivor_keeps_what_it_was_given():
    workers = {name: Worker(name) for name in "ab"}

    def train(worker, links):
        worker.enter(links)
        worker.step(lambda value: value + "+")

    in_generation(workers, 1, train)
    del workers["a"]
    in_generation(workers, 2, train)
    workers["c"] = Worker("c")
    in_generation(workers, 3, train)
    assert workers["c"].value.number == "a++"
    assert workers["b"].value.number == "b+++"


def draw():
    return torch.rand(2).tolist(), np.random.rand(), random.random()  # noqa: NPY002


def test_random_numbers_go_on_where_they_stood():
    state = RandomState()
    before = state.state_dict()
    drawn = draw()
    state.load_state_dict(before)
    assert draw() == drawn
    assert draw() != drawn
