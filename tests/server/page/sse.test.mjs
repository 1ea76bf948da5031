import assert from "node:assert/strict";
import test from "node:test";

const { SseParser, sseData } = await import(process.env.PAGE + "/sse.js");

const TEXT = 'data: {"a":1}\n\n: a comment\nevent: x\ndata: two\ndata:  lines\r\n\r\nid: 3\n\ndata\n\ndata: é漢🙂\r\rdata: cut off';
const WANT = ['{"a":1}', "two\n lines", "", "é漢🙂"];

test("whole text", () => assert.deepEqual(new SseParser().push(TEXT), WANT));

test("any single cut gives the same events", () => {
  for (let cut = 0; cut <= TEXT.length; cut += 1) {
    const parser = new SseParser();
    assert.deepEqual([...parser.push(TEXT.slice(0, cut)), ...parser.push(TEXT.slice(cut))], WANT, `cut at ${cut}`);
  }
});

function streamOf(bytes, size, onCancel = () => {}) {
  let at = 0;
  return new ReadableStream({
    pull(controller) {
      if (at >= bytes.length) return controller.close();
      controller.enqueue(bytes.slice(at, (at += size)));
    },
    cancel: onCancel,
  });
}

test("bytes in pieces of any size, characters cut in the middle", async () => {
  const bytes = new TextEncoder().encode(TEXT);
  for (const size of [1, 2, 3, 7, bytes.length]) {
    const got = [];
    for await (const data of sseData(streamOf(bytes, size))) got.push(data);
    assert.deepEqual(got, WANT, `pieces of ${size}`);
  }
});

test("walking away cancels the stream", async () => {
  let cancelled = false;
  const body = streamOf(new TextEncoder().encode("data: 1\n\ndata: 2\n\n".repeat(100)), 9, () => (cancelled = true));
  for await (const data of sseData(body)) if (data === "2") break;
  assert.equal(cancelled, true);
});
