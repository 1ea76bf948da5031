import assert from "node:assert/strict";
import test from "node:test";

const { bytes, cardRows } = await import(process.env.PAGE + "/model_card.js");
const { EXAMPLES } = await import(process.env.PAGE + "/examples.js");

test("what the server tells about its model, and nothing it does not", () => {
  const model = { id: "demo", number_format: "int4", weight_bytes: 538_000_000, max_model_len: 8192, device: "cpu", memory: "" };
  const rows = [["Name", "demo"], ["Weights", "538 MB on disk"], ["Format", "int4"], ["Context", "8,192 tokens"], ["Device", "cpu"]];
  assert.deepEqual(cardRows(model), rows);
  assert.equal(bytes(15_230_000_000), "15.2 GB");
});

test("another engine, its replicas, and what it lacks", () => {
  const model = { id: "m", engine: "vllm 0.32.0", replicas: { all: 3, usable: 2 }, missing: { prediction: "leave it out" } };
  const rows = [["Name", "m"], ["Engine", "vllm 0.32.0"], ["Replicas", "2 of 3"], ["No prediction", "leave it out"]];
  assert.deepEqual(cardRows({ ...model, different: { seed: "repeats less" } }), [...rows, ["seed", "repeats less"]]);
  assert.deepEqual(cardRows({ id: "m", replicas: { all: 1, usable: 1 }, missing: {} }), [["Name", "m"]]);
});

test("examples have the text in them that their answers repeat", () => {
  assert.ok(EXAMPLES.length >= 4 && EXAMPLES.length <= 6);
  for (const { title, about, prompt } of EXAMPLES) assert.ok(title && about && prompt.length > 150, title);
});
