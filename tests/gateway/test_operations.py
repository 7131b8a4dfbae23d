"""Histograms, the access log, the OpenAPI document, traces, TLS and slow bodies."""

from __future__ import annotations

import asyncio
import datetime
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from prometheus_client.parser import text_string_to_metric_families

from rollmill.errors import ConfigError
from rollmill.gateway.watching.observer import ACCESS_LOG
from rollmill.launch.roles.gateway import prepare_process, tls_context
from rollmill.launch.services import health
from rollmill.runs.free_ports import free_ports
from rollmill.runs.run import RunDirectory
from scripts.reference_pages import gateway_document
from tests.gateway.conftest import QUICK, USER, Answers, Mill, collect_as_usual
from tests.gateway.serve import LIVE
from tests.gateway.stand_in import StandIn
from tests.runs.conftest import make_config


async def test_latencies_are_histograms_by_class_model_and_dialect(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one two three")])))
    for model in ("rollmill", "main"):
        status, _ = await door.ask(LIVE, [USER], model=model, max_tokens=100)
        assert status == 200
    families = {family.name: family for family in text_string_to_metric_families(await door.metrics())}
    for name in ("first_token", "between_tokens", "request", "queue"):
        family = families[f"rollmill_gateway_{name}_seconds"]
        counts = {sample.labels["model"]: sample.value for sample in family.samples if sample.name.endswith("_count")}
        assert family.type == "histogram" and counts["main"] == counts["rollmill"] > 0, name
        labels = {(sample.labels["traffic"], sample.labels["dialect"]) for sample in family.samples}
        assert labels == {("production", "openai_chat")}


async def test_every_route_has_its_own_dialect_in_the_metrics(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    bodies = {"/v1/responses": {"input": "x"}, "/s/chat-7/v1/completions": {"prompt": "x"}}
    for path, body in bodies.items():
        assert (await door.admin("POST", path, body, token=LIVE))[0] == 200
    families = {family.name: family for family in text_string_to_metric_families(await door.metrics())}
    samples = families["rollmill_gateway_request_seconds"].samples
    assert {sample.labels["dialect"] for sample in samples} == {"openai_responses", "openai_completions"}


async def test_the_access_log_has_facts_and_no_contents(mill: Mill, answers: Answers) -> None:
    secret_text = "my password is hunter2"
    key, secret = mill.keys.create(["production"])
    async with mill.running(await mill.engine(StandIn([answers.text("private answer")]))) as door:
        await door.ask(secret, [{"role": "user", "content": secret_text}])
        await door.ask("wrong", [USER])
        async with door.http.get(f"{door.url}/nowhere/{secret}?key={secret}") as response:
            assert response.status == 404
    text = (mill.directory / "gateway" / ACCESS_LOG).read_text()
    assert all(word not in text for word in (secret, "hunter2", "private", "wrong"))
    answered, refused, unknown = map(json.loads, text.splitlines())
    assert (answered["status"], answered["key"], answered["traffic"]) == (200, key.id, "production")
    assert answered["sampled_tokens"] == len(answers.text("private answer")) and answered["prompt_tokens"] > 0
    assert answered["session"] and answered["first_token_seconds"] <= answered["seconds"]
    assert (refused["status"], refused["key"], refused["route"]) == (401, None, "/v1/chat/completions")
    assert (unknown["status"], unknown["route"]) == (404, "unknown")


async def test_the_openapi_document_has_every_route(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("x")])))
    async with door.http.get(f"{door.url}/openapi.json") as response:
        document = await response.json()
    assert document == gateway_document()  # docs/reference/http.md is made from that one
    for path, operations in document["paths"].items():
        if "post" in operations:
            (content,) = operations["post"]["requestBody"]["content"].values()
            assert content["schema"]["properties"], f"{path}: a fuzzer would send nothing but empty objects"
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert chat["summary"].startswith("Answer a conversation") and chat["security"] == [{"key": []}]


async def test_a_request_becomes_a_span_of_the_callers_trace(mill: Mill, answers: Answers) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    exported: list[bytes] = []

    async def collect(request: web.Request) -> web.Response:
        body = await request.read()
        if request.headers.get("Content-Encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        exported.append(body)
        return web.Response()

    collector = web.Application()
    collector.router.add_post("/v1/traces", collect)
    async with TestServer(collector) as server:
        config = QUICK.model_copy(update={"traces": str(server.make_url("/v1/traces"))})
        trace = "0af7651916cd43dd8448eb211c80319c"
        async with mill.running(await mill.engine(StandIn([answers.text("x")])), config=config) as door:
            await door.ask(LIVE, [USER], headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"})
    spans = [
        span
        for body in exported
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
        if span.name.startswith("POST")
    ]
    assert [(span.name, span.trace_id.hex()) for span in spans] == [("POST /v1/chat/completions", trace)]
    assert "Fix add" not in str(spans)
    (span,) = spans
    facts = {each.key: each.value for each in span.attributes}
    assert facts["rollmill.status"].int_value == 200 and facts["rollmill.traffic"].string_value == "production"
    took_s = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert took_s == pytest.approx(facts["rollmill.seconds"].double_value, abs=1e-3) and took_s > 0


def test_nothing_of_opentelemetry_is_imported_while_traces_are_off() -> None:
    code = "import sys, rollmill.gateway.app; assert not any(name.startswith('opentelemetry') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


async def test_a_slow_body_gets_408(mill: Mill, answers: Answers) -> None:
    config = QUICK.model_copy(update={"body_wait_s": 0.05})
    door = await mill.gateway(await mill.engine(StandIn([answers.text("x")])), config=config)
    host, _, port = door.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    key = f"x-api-key: {LIVE}\r\n".encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + key + b"Content-Length: 10\r\n\r\n{")
    async with asyncio.timeout(60):  # it would wait for ever
        assert (await reader.readline()).split()[1] == b"408"
    writer.close()


async def test_a_service_answers_https_with_a_certificate(tmp_path: Path) -> None:
    config = make_config(f"gateway.tls_cert={tmp_path}/cert.pem", f"gateway.tls_key={tmp_path}/key.pem")
    run = RunDirectory.create(tmp_path, config)
    [port] = free_ports(1)
    service = run.make_service("serve-1", "127.0.0.1", port)
    assert (run.tls_of_serve, service.tls_of_serve, run.make_service("eval-1", "127.0.0.1", 1).tls_of_serve) == (
        False,
        True,
        False,
    )
    with pytest.raises(ConfigError, match="tls_cert"):
        tls_context(config.gateway)
    write_certificate(tmp_path)
    app = web.Application()
    app.router.add_get("/health", _healthy)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls_context(config.gateway)).start()
        assert service.url("gateway").startswith("https://")
        assert await asyncio.to_thread(health, service) == {"status": "ok"}
    finally:
        await runner.cleanup()


async def _healthy(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


def write_certificate(directory: Path) -> None:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gateway.example")])
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (directory / "cert.pem").write_bytes(certificate.public_bytes(pem))
    (directory / "key.pem").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))


def test_the_process_may_open_many_connections() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[0]), before[1]))
    try:
        prepare_process()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(before[1], 1 << 16)
    finally:
        collect_as_usual()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
