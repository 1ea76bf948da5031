"""The files in deploy/: sound by the schemas of what reads them, and in agreement with the package and each other."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from outrider import __version__
from outrider.server.settings import DEADLINE, DRAIN_TIMEOUT, MAX_BODY

ROOT = Path(__file__).parents[3]
DEPLOY, HERE = ROOT / "deploy", Path(__file__).parent
KUBERNETES = sorted(DEPLOY.glob("kubernetes-*.yaml"))


def instructions():
    """(instruction, rest) of the Dockerfile, continued lines joined."""
    text = (DEPLOY / "Dockerfile").read_text()
    lines = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    return [tuple(line.split(None, 1)) for line in lines if line.strip()]


def stages():
    """The instructions of each stage, by its name."""
    found = {}
    for word, rest in instructions():
        if word == "FROM":
            image, _, name = rest.partition(" AS ")
            found[name] = [("FROM", image)]
        else:
            found[name].append((word, rest))
    return found


def values(text):
    return dict(part.split("=", 1) for part in text.split())


def test_every_source_of_the_images_is_here_and_let_through():
    known = {"FROM", "RUN", "COPY", "ENV", "EXPOSE", "VOLUME", "HEALTHCHECK", "ENTRYPOINT", "CMD", "USER", "WORKDIR"}
    assert {word for word, _ in instructions()} <= known
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from="):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in ignored, source
        if word == "COPY" and rest.startswith("--from="):
            assert rest.split()[0].removeprefix("--from=") in stages()


def test_images_are_pinned_and_run_as_no_root():
    found = stages()
    for name, lines in found.items():
        image = lines[0][1]
        assert image in found or re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*", image), image
        if name in ("cpu", "cuda"):
            assert lines[-1] == ("USER", "10001"), name
    base = dict(found["base"])
    assert "useradd --uid 10001" in base["RUN"]
    command = json.loads(base["ENTRYPOINT"])
    assert command[:2] == ["outrider", "serve"]
    assert values(base["ENV"])["OUTRIDER_HOME"] == base["VOLUME"] == "/models"
    assert base["EXPOSE"] == "8000" == command[command.index("--port") + 1]
    assert "torch==" + re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1] in str(
        found
    )


@pytest.mark.parametrize("file", KUBERNETES, ids=lambda each: each.stem)
def test_kubernetes_takes_the_manifest(file):
    recorded = json.loads((HERE / "kubernetes_schema.json").read_text())
    documents = list(yaml.safe_load_all(file.read_text()))
    assert sorted(each["kind"] for each in documents) == ["Deployment", "PersistentVolumeClaim", "Service"]
    for each in documents:
        schema = {"$ref": f"#/$defs/{recorded['kinds'][each['kind']]}", "$defs": recorded["$defs"]}
        jsonschema.validate(each, schema, cls=jsonschema.Draft202012Validator)
    wrong = documents[2] | {"spec": documents[2]["spec"] | {"replica": 2}}
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        jsonschema.validate(wrong, {"$ref": "#/$defs/V1Deployment", "$defs": recorded["$defs"]})


@pytest.mark.parametrize("file", KUBERNETES, ids=lambda each: each.stem)
def test_the_manifest_s_parts_fit_together(file):
    claim, service, deployment = yaml.safe_load_all(file.read_text())
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    labels = pod["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"http": 8000}
    assert service["spec"]["ports"][0]["targetPort"] in ports
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["httpGet"] == {"path": "/health", "port": "http"}
    assert pod["spec"]["terminationGracePeriodSeconds"] > DRAIN_TIMEOUT
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == volumes.keys()
    assert volumes["models"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert pod["spec"]["securityContext"]["runAsUser"] == 10001
    assert {"cpu", "memory"} <= container["resources"]["limits"].keys()
    gpus = container["resources"]["limits"].get("nvidia.com/gpu")
    assert (container["image"], gpus) == (
        (f"outrider:{__version__}-cuda", "1") if "gpu" in file.stem else (f"outrider:{__version__}-cpu", None)
    )


def test_compose_takes_the_file():
    found = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    schema = json.loads((HERE / "compose_schema.json").read_text())
    jsonschema.validate(found, schema, cls=jsonschema.Draft7Validator)
    with pytest.raises(jsonschema.ValidationError, match="volume"):
        jsonschema.validate(found | {"services": {"a": {"volume": []}}}, schema, cls=jsonschema.Draft7Validator)
    for name, service in found["services"].items():
        tag = service["image"].partition(":")[2]
        assert re.match(r"\d+\.\d+\.\d+", tag), name
        if "build" in service:
            assert service["build"]["target"] in stages()
            assert service["image"] == f"outrider:{__version__}-{service['build']['target']}"
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).exists()
            assert float(service["stop_grace_period"].removesuffix("s")) > DRAIN_TIMEOUT
    assert (DEPLOY / found["services"]["nginx"]["volumes"][0].split(":")[0]).exists()


@pytest.mark.skipif(
    shutil.which("docker") is None
    or subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode != 0,
    reason="docker compose is not installed",
)
def test_docker_compose_itself_takes_the_file():
    words = ["docker", "compose", "-f", str(DEPLOY / "compose.yaml"), "--profile", "gpu", "config", "--quiet"]
    done = subprocess.run(words, capture_output=True, text=True, env={"OUTRIDER_API_KEY": "x" * 8}, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("kubeconform") is None, reason="kubeconform is not installed")
@pytest.mark.parametrize("file", KUBERNETES, ids=lambda each: each.stem)
def test_kubeconform_takes_the_manifest(file):
    done = subprocess.run(["kubeconform", "-strict", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_nginx_passes_on_what_the_server_takes():
    text = (DEPLOY / "nginx.conf").read_text()
    read = float(re.search(r"proxy_read_timeout (\d+)s", text)[1])
    assert read > DEADLINE
    assert int(re.search(r"client_max_body_size (\d+)m", text)[1]) << 20 == MAX_BODY
    assert "proxy_buffering off;" in text
    replicas = set(re.findall(r"server (outrider-\d):8000", text))
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert replicas == {name for name in services if re.fullmatch(r"outrider-\d", name)}
