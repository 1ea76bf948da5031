"""Advice from the counters of a server."""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from outrider.advise.remote import Counters, advise_remote, best_length, parse_counters, read_counters
from outrider.cli.main import main
from outrider.core.errors import ConfigError
from outrider.prove.api import Api, ApiError

TEXT = """# HELP vllm:spec_decode_num_drafts_total Number of drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 600.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 400.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 3000.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 1300.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 800.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 400.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 100.0
vllm:num_requests_running{engine="0"} 3.0
"""


def test_counters_are_read_as_vllm_writes_them():
    found = parse_counters(TEXT, "here")
    assert found == Counters(1000, 3000, 1300, (800, 400, 100), 3.0)
    assert found.tau == pytest.approx(2.3)
    assert found.survival == [0.8, 0.4, 0.1]
    assert found.length == 3.0


def test_the_length_is_the_best_of_all():
    found = parse_counters(TEXT, "here")
    for price in (0.01, 0.05, 0.15, 0.5, 0.9):
        speeds = [(1 + sum(found.survival[:k])) / (1 + k * price) for k in range(4)]
        assert best_length(found, price) == speeds.index(max(speeds))


def test_what_is_said():
    said = " ".join(advise_remote(parse_counters(TEXT, "here")))
    for words in ("drafts of 2 where it is a draft model", "2.30 tokens a pass", "0.80, 0.40, 0.10"):
        assert words in said, words
    bad = Counters(1000, 3000, 150, (120, 20, 10), 0.0)
    assert "none where it is a draft model" in advise_remote(bad)[0]
    assert "rejected more often than not" in " ".join(advise_remote(bad))
    assert "too little" in advise_remote(Counters(10, 30, 12, (8, 4, 0), 0.0))[0]


def test_a_server_s_counters_as_lines_and_as_a_page(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("outrider.advise.remote.read_counters", lambda url, key: parse_counters(TEXT, url))
    file = tmp_path / "advice.html"
    with pytest.raises(SystemExit) as left:
        main(["advise", "--url", "http://here", "--html", str(file)])
    said, text = "".join(capsys.readouterr()), file.read_text()
    assert not left.value.code
    assert "bench serve" in said
    assert "2.30 tokens a pass" in text
    assert text.count("<svg") == 1
    with pytest.raises(SystemExit) as left:
        main(["advise", "--url", "http://here", "--draft", "x"])
    assert left.value.code == 2
    assert "--draft has no effect with --url" in capsys.readouterr().err


class Guarded(BaseHTTPRequestHandler):
    """Metrics for those who have the key."""

    def do_GET(self):
        known = self.headers.get("Authorization") == "Bearer right"
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(TEXT.encode() if known else b"{}")

    def log_message(self, *said):
        pass


def test_a_server_s_key_is_sent_and_asked_for():
    with ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert read_counters(url, "right") == parse_counters(TEXT, "here")
        with pytest.raises(ConfigError, match=r"answers 401; set OPENAI_API_KEY"):
            read_counters(f"{url}/v1")
        with pytest.raises(ApiError, match=r"answers 401: .*set OPENAI_API_KEY"):
            Api(url, "wrong").kind()
        server.shutdown()


def test_bad_addresses_are_told():
    with pytest.raises(ConfigError, match="--url takes an address"):
        read_counters("file:///etc/passwd")
    with pytest.raises(ConfigError, match=r"cannot be read \(Connection refused\)"):
        read_counters("http://127.0.0.1:9/v1")
    with pytest.raises(ApiError, match=r"does not answer \(Connection refused\)"):
        Api("http://127.0.0.1:9", "").kind()
    with pytest.raises(ConfigError, match="does not speculate"):
        parse_counters("up 1\n", "here")
