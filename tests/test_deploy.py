"""The files in examples/deploy agree with the server: its metrics, options, paths and ports."""

import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml

from rootlace.cli.app import app
from rootlace.deploy import MORE_SECONDS
from rootlace.deploy import app as ray_app
from rootlace.runtime.config import GatewayConfig, RuntimeConfig, runtime_config
from rootlace.runtime.engine.core import EngineLoop
from rootlace.runtime.server.http.app import endpoints
from rootlace.runtime.server.telemetry import Metrics
from tests.engine.harness import Harness
from tests.server.http.fake_model import FakeModel
from tests.simulated_executor import SimulatedExecutor

HERE = Path(__file__).resolve().parents[1] / "examples" / "deploy"
YAML = sorted(HERE.rglob("*.yaml"))
DASHBOARD = HERE / "grafana" / "dashboards" / "rootlace.json"
PORT, PROGRAMS = 30000, 30001


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((HERE / name).read_text()))


def kinds() -> dict[str, Any]:
    return {each["kind"]: each for each in documents("kubernetes.yaml")}


def container() -> Any:
    (found,) = kinds()["Deployment"]["spec"]["template"]["spec"]["containers"]
    return found


def paths() -> set[str]:
    return {each.path for each in endpoints(FakeModel())}  # type: ignore[arg-type]


def test_every_file_can_be_read() -> None:
    assert len(YAML) >= 4
    for path in YAML:
        assert all(documents(str(path.relative_to(HERE)))), path


def test_the_dashboard_shows_metrics_that_exist() -> None:
    """Those that a server has which computes on a simulated device."""
    executor = SimulatedExecutor(16, 4)
    scheduler = Harness(executor, block_size=4).scheduler
    unused: Any = None
    loop = EngineLoop(scheduler, executor, unused, unused, unused)
    text = Metrics().text({**loop.stats(), "sessions": 0, "branches": 0}).decode()
    known = set(re.findall(r"^(rootlace_\w+)(?:\{| )", text, re.MULTILINE))
    # Until the first reply, a counter with labels has no line.
    known.add("rootlace_http_requests_total")
    known |= {f"{name}_bucket" for name in re.findall(r"# TYPE (\w+) histogram", text)}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    (datasource,) = documents("grafana/provisioning/datasources/prometheus.yaml")[0]["datasources"]
    used = set()
    for panel in panels:
        assert panel["datasource"]["uid"] == datasource["uid"] and panel["targets"]
        for target in panel["targets"]:
            used |= set(re.findall(r"rootlace_\w+", target["expr"]))
    assert len(used) > 10 and used <= known, used - known


def commands() -> dict[str, list[str]]:
    """The arguments of `rootlace serve` in each file."""
    docker = (HERE / "Dockerfile").read_text()
    entry = json.loads(docker.partition("ENTRYPOINT ")[2])
    assert entry[:2] == ["rootlace", "serve"]
    unit = re.search(r"^ExecStart=\S+/rootlace serve (.*)$", _unit(), re.MULTILINE)
    assert unit is not None
    return {
        "Dockerfile": entry[2:],
        "compose": documents("compose.yaml")[0]["services"]["rootlace"]["command"],
        "kubernetes": container()["args"],
        "systemd": shlex.split(unit[1]),
    }


def _unit() -> str:
    return (HERE / "rootlace.service").read_text()


def test_commands_name_options_that_exist() -> None:
    serve = app.commands["serve"]
    for name, arguments in commands().items():
        assert all(isinstance(each, str) for each in arguments), name
        # As the command line reads them: unknown options and wrong values are refused.
        context = serve.make_context("serve", list(arguments))
        if name != "Dockerfile":
            assert context.params["api_key_file"], f"{name}: anybody may ask"


def test_probes_ask_for_paths_that_exist() -> None:
    probes = {kind: container()[f"{kind}Probe"]["httpGet"] for kind in _PROBES}
    assert {kind: probe["path"] for kind, probe in probes.items()} == _PROBES
    scraped = documents("prometheus.yaml")[0]["scrape_configs"][0]
    health = documents("compose.yaml")[0]["services"]["rootlace"]["healthcheck"]["test"][-1]
    annotations = kinds()["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    asked = {scraped["metrics_path"], annotations["prometheus.io/path"], *_PROBES.values()}
    asked |= set(re.findall(rf"{PORT}(/\w+)", health))
    assert asked == {"/ready", "/health", "/metrics"} and asked <= paths()


_PROBES = {"readiness": "/ready", "liveness": "/health", "startup": "/health"}


def test_ports_agree() -> None:
    for name in ("Dockerfile", "systemd"):
        arguments = commands()[name]
        assert arguments[arguments.index("--port") + 1] == str(PORT)
    assert f"EXPOSE {PORT} {PROGRAMS}" in (HERE / "Dockerfile").read_text()
    ports = {each["name"]: each["containerPort"] for each in container()["ports"]}
    assert ports == {"http": PORT, "programs": PROGRAMS}
    assert {probe["port"] for probe in (container()[f"{k}Probe"]["httpGet"] for k in _PROBES)} == {
        "http"
    }
    for port in kinds()["Service"]["spec"]["ports"]:
        assert port["port"] == ports[port["targetPort"]]
    services = documents("compose.yaml")[0]["services"]
    assert [each.split(":", 1)[1] for each in services["rootlace"]["ports"]] == [
        f"{PORT}:{PORT}",
        f"{PROGRAMS}:{PROGRAMS}",
    ]
    scraped = documents("prometheus.yaml")[0]["scrape_configs"][0]
    assert scraped["static_configs"][0]["targets"] == [f"rootlace:{PORT}"]


def test_there_is_time_to_drain() -> None:
    drain = GatewayConfig.__dataclass_fields__["drain_seconds"].default
    grace = [
        kinds()["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"],
        int(documents("compose.yaml")[0]["services"]["rootlace"]["stop_grace_period"].rstrip("s")),
        int(re.findall(r"^TimeoutStopSec=(\d+)$", _unit(), re.MULTILINE)[0]),
    ]
    assert all(seconds >= drain + 10 for seconds in grace)
    # Else the engine, which computes what is to be drained, would be told to stop, too.
    assert "KillMode=mixed" in _unit()


def test_what_is_mounted_is_there() -> None:
    volumes = kinds()["Deployment"]["spec"]["template"]["spec"]["volumes"]
    claims = [each["persistentVolumeClaim"]["claimName"] for each in volumes if len(each) == 2
              and "persistentVolumeClaim" in each]  # fmt: skip
    assert claims == [kinds()["PersistentVolumeClaim"]["metadata"]["name"]]
    assert {each["name"] for each in container()["volumeMounts"]} == {v["name"] for v in volumes}
    for service in documents("compose.yaml")[0]["services"].values():
        for volume in service["volumes"]:
            if volume.startswith("./"):
                assert (HERE / volume.split(":")[0]).exists(), volume
    for copied in re.findall(r"^COPY (\w[\w. ]*) \S+$", _docker(), re.MULTILINE):
        assert all((HERE.parents[1] / each).exists() for each in copied.split()), copied


def _docker() -> str:
    return (HERE / "Dockerfile").read_text()


@pytest.mark.parametrize(
    "linter",
    [
        # The first three are in the extra `clients-all`.
        ["hadolint", "Dockerfile"],
        ["kubernetes-validate", "--strict", "kubernetes.yaml"],
        ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.yaml"],
        ["promtool", "check", "config", "--syntax-only", "prometheus.yaml"],
    ],
    ids=lambda linter: linter[0],
)
def test_linters(linter: list[str]) -> None:
    if (found := _installed(linter[0])) is None:
        pytest.skip(f"{linter[0]} is not installed")
    result = subprocess.run([found, *linter[1:]], cwd=HERE, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_unit_of_systemd_is_one(tmp_path: Path) -> None:
    if (systemd := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "rootlace.service"
    # It looks for the program, which is not installed here.
    unit.write_text(_unit().replace("/opt/rootlace/bin/rootlace", sys.executable))
    result = subprocess.run(
        [systemd, "verify", "--man=no", str(unit)], capture_output=True, text=True
    )
    # Wrong keys and values are only told.
    assert result.returncode == 0 and unit.name not in result.stderr, result.stderr


# ---------------------------------------------------------------- on a Ray cluster


def ray_service() -> Any:
    (found,) = (each for each in documents("kuberay.yaml") if each["kind"] == "RayService")
    return found


def serve_configs() -> dict[str, Any]:
    """What Ray Serve is told in each file."""
    (plain,) = documents("serve.yaml")
    return {"serve": plain, "kuberay": yaml.safe_load(ray_service()["spec"]["serveConfigV2"])}


def groups() -> list[Any]:
    cluster = ray_service()["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def test_the_ray_service_is_one() -> None:
    """The schema is that of KubeRay's resource (v1, commit feeaf72fa of 2026-08-19) without what it
    takes from Kubernetes: pods are for `test_pods_of_a_ray_cluster`."""
    schema = json.loads((Path(__file__).parent / "rayservice_schema.json").read_text())
    jsonschema.validate(ray_service(), schema)
    wrong = ray_service()
    wrong["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["minReplica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="minReplica"):
        jsonschema.validate(wrong, schema)


def test_what_serve_is_told_exists() -> None:
    own = set(inspect.signature(ray_app).parameters) - {"options"}
    for name, config in serve_configs().items():
        (application,) = config["applications"]
        assert application["import_path"] == "rootlace.deploy:build"
        args = application["args"]
        assert own >= {"model", "replicas", "cpus"} and args["model"]
        options = {key: value for key, value in args.items() if key not in own}
        address = options.pop("program_address", "tcp://NODE:30001")
        assert address == f"tcp://NODE:{PROGRAMS}"
        made = runtime_config(args["model"], address, options)
        drain = msgspec.convert(made, RuntimeConfig).gateway.drain_seconds
        names = {each["name"] for each in application.get("deployments", ())}
        assert names <= {"gateway", "engines"}
        if name == "kuberay":
            assert made["gateway"]["keys_file"], "anybody may ask"
            for group in groups():
                grace = group["template"]["spec"]["terminationGracePeriodSeconds"]
                assert grace >= drain + MORE_SECONDS
                (pod,) = group["template"]["spec"]["containers"]
                mounted = {each["name"] for each in pod["volumeMounts"]}
                assert mounted == {each["name"] for each in group["template"]["spec"]["volumes"]}


def test_an_engine_fits_a_node_and_the_gateway_stays() -> None:
    config = serve_configs()["kuberay"]
    (application,) = config["applications"]
    head, workers = groups()
    (pod,) = workers["template"]["spec"]["containers"]
    assert application["args"]["cpus"] <= int(pod["resources"]["limits"]["cpu"])
    _, most = application["args"]["replicas"].split("-")
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"] == int(most)
    (gateway,) = application["deployments"]
    offered = json.loads(json.loads(head["rayStartParams"]["resources"]))
    assert gateway["ray_actor_options"]["resources"] == offered
    ports = {each["name"]: each["containerPort"]
             for each in head["template"]["spec"]["containers"][0]["ports"]}  # fmt: skip
    assert ports["serve"] == config["http_options"]["port"] and ports["programs"] == PROGRAMS
    scraped = head["template"]["metadata"]["annotations"]["prometheus.io/port"]
    assert scraped == str(ports["serve"])


def test_pods_of_a_ray_cluster(tmp_path: Path) -> None:
    if (linter := _installed("kubernetes-validate")) is None:
        pytest.skip("kubernetes-validate is not installed")
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"pod-{at}"},
         "spec": group["template"]["spec"]}
        for at, group in enumerate(groups())
    ]  # fmt: skip
    claims = [each for each in documents("kuberay.yaml") if each["kind"] != "RayService"]
    file = tmp_path / "pods.yaml"
    file.write_text(yaml.safe_dump_all([*claims, *pods]))
    result = subprocess.run([linter, "--strict", str(file)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_serve_reads_what_it_is_told() -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="the extra `ray` is not installed")
    for config in serve_configs().values():
        schema.ServeDeploySchema.model_validate(config)


def _installed(program: str) -> str | None:
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return shutil.which(program, path=beside)
