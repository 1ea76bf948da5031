import assert from "node:assert/strict";
import test from "node:test";

const { Api, ApiError, words } = await import(process.env.PAGE + "/api.js");

function answering(status, body, headers = {}) {
  const calls = [];
  const fetcher = async (path, options) => {
    calls.push([path, options]);
    return new Response(body, { status, headers });
  };
  return { api: new Api(() => "secret", fetcher), calls };
}

async function collect(chunks) {
  const all = [];
  for await (const chunk of chunks) all.push(chunk);
  return all;
}

test("a chat asks for a stream with usage, with the key as Bearer", async () => {
  const { api, calls } = answering(200, 'data: {"choices":[]}\n\ndata: [DONE]\n\ndata: {"after":1}\n\n');
  assert.deepEqual(await collect(api.chat({ seed: 1 })), [{ choices: [] }]);
  const [path, options] = calls[0];
  assert.equal(path, "/v1/chat/completions");
  assert.equal(options.headers.Authorization, "Bearer secret");
  assert.deepEqual(JSON.parse(options.body), { seed: 1, stream: true, stream_options: { include_usage: true } });
});

test("a chat leaves out what the engine lacks, once the server has told", async () => {
  const { api, calls } = answering(200, '{"data":[{"id":"m","missing":{"speculation":"why"}}]}');
  await api.models();
  await collect(api.chat({ seed: 1, speculation: {} })).catch(() => null); // the answer is no stream
  assert.deepEqual(Object.keys(JSON.parse(calls[1][1].body)), ["seed", "stream", "stream_options"]);
});

test("an error inside the stream is thrown after what came before it", async () => {
  const { api } = answering(200, 'data: {"choices":[]}\n\ndata: {"error":{"message":"engine gone"}}\n\n');
  const chunks = api.chat({});
  assert.deepEqual((await chunks.next()).value, { choices: [] });
  await assert.rejects(chunks.next(), (error) => words(error) === "The answer broke off: engine gone.");
});

for (const [name, body] of [["no end", 'data: {"choices":[]}\n\n'], ["not JSON", "data: {oops\n\n"]]) {
  test(`a broken stream (${name}) is an error, not an end`, async () => {
    await assert.rejects(collect(answering(200, body).api.chat({})), ApiError);
  });
}

test("refusals in words", async () => {
  const said = async (status, body, headers) => {
    const error = await answering(status, body, headers).api.models().catch((caught) => caught);
    return words(error);
  };
  const because = JSON.stringify({ error: { message: "queue holds 8 of 8" } });
  assert.match(await said(401, "{}"), /API key/);
  assert.match(await said(429, because, { "Retry-After": "3" }), /queue is full.*queue holds 8 of 8\. Try again in 3 s\.$/);
  assert.match(await said(503, "<html>"), /not ready/);
  assert.match(await said(418, because), /status 418.*queue holds 8/);
  assert.match(words(new TypeError("Failed to fetch")), /cannot be reached/);
});
