"""Several replicas behind one address: who is asked, and what a dead, draining or slow one costs."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from fake_vllm import FakeVllm, words_of
from remote_world import FakeServer, RemoteRunning, Stream, running_world
from server_world import until

CLIENTS = 64


@pytest.fixture
def remote():
    yield from running_world()


def asked(running: RemoteRunning) -> list[int]:
    return [len(server.fake.bodies) for server in running.fakes]


def test_a_conversation_stays_where_it_began(remote):
    running = remote(count=3)
    messages = [{"role": "user", "content": "the same beginning " * 20}]
    for turn in range(6):
        assert running.post("/v1/chat/completions", messages=messages, max_tokens=2).status_code == 200
        messages += [{"role": "assistant", "content": f"answer {turn}"}, {"role": "user", "content": f"go on {turn}"}]
    assert sorted(asked(running)) == [0, 0, 6]


def test_prompts_are_spread(remote):
    running = remote(count=3)
    for i in range(60):
        running.post("/v1/completions", prompt=f"{i} is another prompt", max_tokens=1)
    assert min(asked(running)) >= 10


def test_a_prefix_that_all_share_does_not_overload_its_replica(remote):
    """With nothing else to tell them apart, streams of one prompt are spread by load."""
    running = remote(count=3)
    for server in running.fakes:
        server.fake.hold_after = 1
    streams = [Stream(running, {"prompt": "shared " * 100, "max_tokens": 2}).begin() for _ in range(12)]
    until(lambda: sum(asked(running)) == 12)
    assert max(asked(running)) <= 6
    assert min(asked(running)) >= 2
    for server in running.fakes:
        server.go()
    assert [stream.end().error for stream in streams] == [None] * 12


def test_one_of_three_is_killed_under_64_clients(remote):
    """Only the streams that it had begun end, each with an error; all others are complete."""
    running = remote(count=3)
    for server in running.fakes:
        server.fake.hold_after = 3
    prompts = [f"{i} of many prompts" for i in range(CLIENTS)]
    streams = [Stream(running, {"prompt": prompt, "max_tokens": 6}).begin() for prompt in prompts]
    until(lambda: all(len(stream.lines) >= 3 for stream in streams))
    victim = max(range(3), key=lambda i: asked(running)[i])
    lost = asked(running)[victim]
    running.fakes[victim].kill()
    until(lambda: running.states()[victim] == "dead")
    for i, server in enumerate(running.fakes):
        if i != victim:
            server.go()
    ended = Counter()
    for prompt, stream in zip(prompts, streams, strict=True):
        stream.end()
        whole = words_of(prompt, 6)
        assert not stream.broken
        if stream.error is None:
            assert stream.text == "".join(whole)
        else:
            assert stream.error["code"] == "engine_failed"
            assert stream.text == "".join(whole[:3])
        ended[stream.error is None] += 1
    assert ended == {False: lost, True: CLIENTS - lost}
    assert lost >= 1
    assert running.http.get("/health").status_code == 200
    assert running.front.queue.running == sum(replica.load for replica in running.front.pool.replicas) == 0


def test_what_has_not_begun_is_sent_to_another(remote):
    running = remote(count=2)
    for server in running.fakes:
        server.fake.hold_after = 0  # not a single token
    streams = [Stream(running, {"prompt": f"prompt {i}", "max_tokens": 3}).begin() for i in range(8)]
    until(lambda: sum(asked(running)) == 8)
    assert min(asked(running)) >= 1
    lost = asked(running)[0]
    running.fakes[0].kill()
    until(lambda: asked(running)[1] == 8)
    running.fakes[1].go()
    for i, stream in enumerate(streams):
        assert stream.end().error is None
        assert stream.text == "".join(words_of(f"prompt {i}", 3))
    assert running.metric('outrider_replica_failures_total{replica="0"}') == f"{lost}.0"


def test_a_whole_answer_is_tried_once_more_and_not_twice(remote):
    running = remote(count=3)
    for server in running.fakes:
        server.fake.refuse = (500, {"error": {"message": "broken", "code": 500}})
    answer = running.post("/v1/completions", prompt="a")
    assert answer.status_code == 500
    assert sum(asked(running)) == 2
    assert running.states() == ["ready"] * 3, "one that says why is still there"


def test_a_full_replica_s_request_goes_to_another(remote):
    running = remote(count=2)
    running.fakes[0].fake.refuse = (429, {"error": {"message": "full", "code": "queue_full"}})
    for i in range(10):
        assert running.post("/v1/completions", prompt=f"prompt {i}", max_tokens=1).status_code == 200
    assert asked(running)[1] == 10


def test_a_draining_replica_finishes_and_is_given_nothing_more(remote):
    running = remote(count=2)
    draining = running.fakes[0].fake
    draining.hold_after = 1
    prompts = iter(range(1000))
    while not draining.bodies:  # some prompt is routed there
        stream = Stream(running, {"prompt": f"prompt {next(prompts)}", "max_tokens": 3}).begin()
        until(lambda stream=stream: stream.lines)
    draining.health = 503
    until(lambda: running.states()[0] == "draining")
    for _ in range(10):
        assert running.post("/v1/completions", prompt=f"prompt {next(prompts)}", max_tokens=1).status_code == 200
    assert len(draining.bodies) == 1
    running.fakes[0].go()
    assert stream.end().error is None
    draining.health = 200
    until(lambda: running.states() == ["ready", "ready"])
    while len(draining.bodies) == 1:
        running.post("/v1/completions", prompt=f"prompt {next(prompts)}", max_tokens=1)


def test_a_killed_replica_is_taken_back(remote):
    running = remote()
    running.fakes[0].kill()
    until(lambda: running.http.get("/health").status_code == 503)
    answer = running.post("/v1/completions", prompt="a")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert running.metric('outrider_state{state="dead"}') == "1.0"
    running.fakes[0].start()
    until(lambda: running.http.get("/health").status_code == 200)
    assert running.post("/v1/completions", prompt="a").status_code == 200


def test_a_slow_replica_is_left_out_where_there_is_another(remote):
    running = remote(count=2)
    running.fakes[0].fake.hold_health = True
    until(lambda: running.states()[0] == "slow")
    for i in range(10):
        assert running.post("/v1/completions", prompt=f"prompt {i}", max_tokens=1).status_code == 200
    assert asked(running) == [0, 10]
    running.fakes[0].fake.hold_health = False
    until(lambda: running.states()[0] == "ready")


def test_a_slow_replica_is_asked_where_it_is_the_only_one(remote):
    running = remote()
    running.fake.hold_health = True
    until(lambda: running.states() == ["slow"])
    assert running.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
    running.fake.hold_health = False


def test_a_replica_of_another_model_is_left_out(remote):
    running = remote(FakeServer(FakeVllm("fake")), FakeServer(FakeVllm("another")), wait=False)
    until(lambda: "ready" in running.states() and any(r.problem for r in running.front.pool.replicas))
    for i in range(6):
        assert running.post("/v1/completions", prompt=f"prompt {i}", max_tokens=1).status_code == 200
    assert 0 in asked(running)
    problem = next(replica.problem for replica in running.front.pool.replicas if replica.problem)
    assert "replicas serve one model" in problem


def test_before_any_replica_is_there(remote):
    server = FakeServer()
    server.kill()
    running = remote(server, wait=False)
    answer = running.http.get("/health")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_loading")
    server.start()
    until(lambda: running.http.get("/health").status_code == 200)


def test_clients_take_turns_in_a_bounded_queue(remote):
    running = remote(max_running=1, max_queue=2, api_keys=("first-key-1", "second-key-2"))
    running.fake.hold_after = 0
    done: list[str] = []

    def ask(key: str, prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": 1}
        answer = running.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        done.append(f"{prompt} {answer.status_code}")

    def begin(key: str, prompt: str) -> threading.Thread:
        thread = threading.Thread(target=ask, args=(key, prompt), daemon=True)
        thread.start()
        return thread

    threads = [begin("first-key-1", "a")]
    until(lambda: len(running.fake.bodies) == 1)
    for count, (key, prompt) in enumerate((("first-key-1", "b"), ("first-key-1", "c")), 1):
        threads.append(begin(key, prompt))
        until(lambda count=count: running.front.queue.waiting == count)
    ask("first-key-1", "d")
    assert done == ["d 429"], "its share is the whole queue, which is full"
    threads.append(begin("second-key-2", "e"))
    until(lambda: running.front.queue.waiting == 3)  # another client has its share
    running.fakes[0].go()
    for thread in threads:
        thread.join(20)
    assert [body["prompt"] for body in running.fake.bodies] == ["a", "b", "e", "c"]


def test_draining_finishes_what_is_open_and_refuses_the_rest(remote):
    running = remote()
    running.fake.hold_after = 1
    stream = Stream(running, {"prompt": "a", "max_tokens": 3}).begin()
    until(lambda: stream.lines)
    running.front.drain(20)
    until(lambda: running.front.state == "draining")
    assert running.post("/v1/completions", prompt="b").json()["error"]["code"] == "shutting_down"
    assert not running.front.stopped.is_set()
    running.fakes[0].go()
    assert stream.end().error is None
    assert running.front.stopped.wait(10)


def test_draining_ends_after_its_time(remote):
    running = remote()
    running.fake.hold_after = 1
    stream = Stream(running, {"prompt": "a", "max_tokens": 3}).begin()
    until(lambda: stream.lines)
    running.front.drain(0.1)
    assert stream.end().error is not None
    assert stream.error["code"] == "shutting_down"
