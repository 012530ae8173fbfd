"""Rootlace on a Ray cluster of two nodes on this machine, by Ray's own utilities."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

pytest.importorskip("ray.serve", reason="the extra `ray` is not installed")

import ray
from click.testing import CliRunner
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.scripts import cli

from rootlace.runtime.assets import demo_model
from tests.waiting import eventually

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "deploy" / "serve.yaml"
PORT = 28123  # below the system's ephemeral ports
URL = f"http://127.0.0.1:{PORT}"
NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}
PROMPTS = [f"The story of number {at} began on a long day where the road ends. " for at in range(6)]
PATIENCE = 300.0
PAUSE = 0.5
# On a busy machine Serve alone takes a minute to start.
pytestmark = pytest.mark.timeout(3600)


class Served:
    """The example's application, as `serve run` runs it: from one to two engines; the second starts
    when the first is used."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self._file = folder / "serve.yaml"
        self.config = yaml.safe_load(EXAMPLE.read_text())
        self.config["http_options"] = {"host": "127.0.0.1", "port": PORT}
        self.config["proxy_location"] = "HeadOnly"
        (application,) = self.config["applications"]
        self.args = application["args"]
        del self.args["keys_file"]
        self.args |= {"model": str(demo_model()), "replicas": "1-2", "cpus": 1, "kv": 0.01}
        self.args |= {"dtype": "float32", "num_blocks": 512, "program_address": "tcp://NODE:0"}
        self.args["autoscaling"] = {
            "upscale_delay_s": 0,
            "look_back_period_s": 1,
            "metrics_interval_s": 0.5,
        }
        gateway = {"num_cpus": 0, "resources": {"head": 0.1}}
        self._deployments = [{"name": "gateway", "ray_actor_options": gateway}]
        application["deployments"] = self._deployments
        self.engines = self.add("engines", 1)

    def add(self, name: str, cpus: float) -> dict[str, Any]:
        """Add a deployment with so many cores for each replica; return it."""
        self._deployments.append({"name": name, "ray_actor_options": {"num_cpus": cpus}})
        return self._deployments[-1]

    def run(self) -> None:
        self._file.write_text(yaml.safe_dump(self.config))
        said = CliRunner().invoke(cli, ["run", str(self._file), "--non-blocking"])
        assert said.exit_code == 0 and "Submitted" in said.output, said.output


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300",
            "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "300",
            "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
        }.items():
            patch.setenv(name, value)
        # A busy machine takes longer than the default minute.
        patch.setattr("ray.serve._private.api.HTTP_PROXY_TIMEOUT", PATIENCE)
        head = {**NODE, "resources": {"head": 1}, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(**NODE)
        ray.init(address=cluster.address, namespace="serve", log_to_driver=False)
        found = Served(cluster, tmp_path_factory.mktemp("serve"))
        found.run()
        eventually(lambda: up() == 1, PATIENCE)
        yield found
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def ask(prompt: str, tokens: int = 120) -> str:
    """Complete a prompt that shares no prefix with others, so that load alone decides where it
    runs. Raises if the request fails."""
    with asked(prompt, tokens) as reply:
        return str(json.load(reply)["choices"][0]["text"])


def asked(prompt: str, tokens: int, **more: Any) -> Any:
    """Open a streamed reply; closing it disconnects."""
    body = {"prompt": prompt, "max_tokens": tokens, "cache_salt": uuid.uuid4().hex, **more}
    request = urllib.request.Request(
        f"{URL}/v1/completions",
        json.dumps({"model": "default", "temperature": 0, "ignore_eos": True, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=PATIENCE)


def metrics() -> dict[str, float]:
    """Return each line of /metrics; empty while the server does not answer."""
    time.sleep(0.2)  # polling must leave time to other processes
    try:
        with urllib.request.urlopen(f"{URL}/metrics", timeout=60) as reply:
            text = reply.read().decode()
    except urllib.error.URLError:
        return {}
    return {name: float(value) for name, value in re.findall(r"^(\w\S*) (\S+)$", text, re.M)}


def up() -> int:
    return sum(
        value == 1 for name, value in metrics().items() if name.startswith("rootlace_up{replica")
    )


def both_run() -> bool:
    """Whether two replicas compute, according to Prometheus."""
    running = [value for name, value in metrics().items() if name.startswith("rootlace_running{")]
    return sum(value > 0 for value in running) == 2


def moved() -> float:
    return metrics().get("rootlace_requests_moved_total", 0.0)


def actors(deployment: str) -> set[str]:
    """Return the names of a deployment's actors."""
    every = ray.util.list_named_actors(all_namespaces=True)
    return {one["name"] for one in every if f"#{deployment}#" in one["name"]}


@pytest.fixture(scope="module")
def texts(served: Served) -> dict[str, str]:
    """Return the answers of an undisturbed server."""
    return {prompt: ask(prompt) for prompt in PROMPTS}


@contextmanager
def load(texts: Mapping[str, str]) -> Iterator[threading.Event]:
    """Ask all prompts repeatedly, in parallel; every answer must equal `texts`. While the event is
    set, each client pauses before it asks again: starting engines need the processor, too."""
    over, calm, wrong = threading.Event(), threading.Event(), list[Any]()

    def run(prompt: str) -> None:
        while not over.is_set():
            if calm.is_set():
                over.wait(PAUSE)
            try:
                if (said := ask(prompt)) != texts[prompt]:
                    wrong.append((prompt, said))
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=run, args=(prompt,)) for prompt in texts]
    for thread in threads:
        thread.start()
    try:
        yield calm
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not wrong, wrong[:3]


def test_who_goes_away_is_noticed(served: Served) -> None:
    """The client is behind two proxies: Serve's, and the one that asks the gateway."""
    aborted = 'rootlace_requests_finished_total{reason="abort",replica="0"}'
    before = metrics()[aborted]
    with asked(PROMPTS[0], 1900, stream=True) as reply:
        assert reply.readline().startswith(b"data: ")
    eventually(lambda: metrics().get(aborted) == before + 1)


def test_who_asks_by_a_strange_name_is_refused(served: Served) -> None:
    """Both proxies pass on the host name that a client uses."""
    request = urllib.request.Request(f"{URL}/version", headers={"Host": "page.example"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(request, timeout=60)


def test_there_are_more_engines_where_they_are_used(texts: dict[str, str]) -> None:
    with load(texts):
        eventually(both_run, PATIENCE)


def strike(texts: dict[str, str], blow: Callable[[], object]) -> None:
    """Under load, requests move to the other engine after the blow; then both engines run again."""
    with load(texts) as calm:
        eventually(both_run, PATIENCE)
        before = moved()
        back = blow()
        eventually(lambda: moved() > before, PATIENCE)
        calm.set()
        if callable(back):
            back()
        eventually(lambda: up() == 2, PATIENCE)
        calm.clear()
        eventually(both_run, PATIENCE)


def processes() -> list[psutil.Process]:
    """Return the engines' processes, each a child of its actor's."""
    every = psutil.Process().children(recursive=True)
    return [one for one in every if "rootlace.runtime.engine" in " ".join(one.cmdline())]


def test_an_engine_whose_process_dies_is_started_again(texts: dict[str, str]) -> None:
    replicas = actors("engines")
    strike(texts, lambda: processes()[0].kill())
    assert actors("engines") == replicas, "its host did so"


def test_what_ran_on_a_machine_that_falls_silent_goes_on_elsewhere(texts: dict[str, str]) -> None:
    """The engine stops without closing connections, and resumes when others have its requests."""

    def silence() -> Callable[[], None]:
        engine = processes()[0]
        host = engine.parent()
        assert host is not None
        for process in (host, engine):
            process.suspend()

        def wake() -> None:
            for process in (engine, host):
                with suppress(psutil.NoSuchProcess):  # Serve may have ended it
                    process.resume()

        return wake

    strike(texts, silence)


def test_what_ran_on_a_replica_that_is_killed_goes_on_elsewhere(texts: dict[str, str]) -> None:
    strike(texts, lambda: ray.kill(ray.get_actor(min(actors("engines")))))


def test_where_all_engines_are_lost_requests_wait_for_the_next(texts: dict[str, str]) -> None:
    strike(texts, lambda: [ray.kill(ray.get_actor(name)) for name in actors("engines")])


def test_what_ran_on_a_node_that_is_lost_goes_on_elsewhere(
    served: Served, texts: dict[str, str]
) -> None:
    (node,) = (one for one in served.cluster.list_all_nodes() if one != served.cluster.head_node)

    def lose() -> Callable[[], object]:
        served.cluster.remove_node(node, allow_graceful=False)
        return lambda: served.cluster.add_node(**NODE)

    strike(texts, lose)


def test_engines_are_replaced_one_after_the_other(served: Served, texts: dict[str, str]) -> None:
    gateway, old = actors("gateway"), actors("engines")
    with load(texts) as calm:
        served.engines["ray_actor_options"]["num_cpus"] = 0.5
        served.run()
        calm.set()
        eventually(lambda: not old & actors("engines") and up() == 2, PATIENCE)
        calm.clear()
        eventually(both_run, PATIENCE)
    assert actors("gateway") == gateway


def test_a_new_version_fails_nobody_and_computes_prompts_apart(
    served: Served, texts: dict[str, str]
) -> None:
    """One engine replaces two, and another computes long prompts for it."""
    old = actors("engines") | actors("gateway")
    long = {8 * prompt: ask(8 * prompt, tokens=40) for prompt in PROMPTS[:3]}
    with load(texts) as calm:
        calm.set()
        served.args |= {"replicas": 1, "prefill": 1, "disaggregate_from": 64}
        served.args["disaggregate_gb"] = 0.01
        del served.args["autoscaling"]
        served.add("prefill", 0.5)
        served.run()
        eventually(lambda: not old & (actors("engines") | actors("gateway")), PATIENCE)
    eventually(lambda: up() == 2, PATIENCE)
    assert metrics()["rootlace_handed_over_blocks_total"] == 0, "the others' prompts are short"
    assert {prompt: ask(prompt, tokens=40) for prompt in long} == long
    assert metrics()["rootlace_handed_over_blocks_total"] >= 3 * 5
