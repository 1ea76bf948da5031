"""A locust user that streams chats and writes down each answer: what tests/server/test_client_locust.py runs."""

import json
import os
from pathlib import Path

from locust import HttpUser, constant, task

BODY = json.loads(os.environ["LOCUST_BODY"])
TOLD = Path(os.environ["LOCUST_TOLD"])


class Reader(HttpUser):
    wait_time = constant(0)

    @task
    def chat(self) -> None:
        self._tell(self.client.post("/v1/chat/completions", json=BODY).json()["choices"][0]["message"]["content"])

    @task
    def stream(self) -> None:
        text = ""
        body = BODY | {"stream": True}
        with self.client.post(
            "/v1/chat/completions", json=body, stream=True, name="stream", catch_response=True
        ) as answer:
            for line in answer.iter_lines():
                data = line.removeprefix(b"data: ")
                if data and data != b"[DONE]":
                    text += json.loads(data)["choices"][0]["delta"].get("content") or ""
        self._tell(text)

    def _tell(self, text: str) -> None:
        with TOLD.open("a") as told:
            told.write(json.dumps(text) + "\n")
