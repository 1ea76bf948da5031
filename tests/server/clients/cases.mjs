// The npm `openai` package against a running server. Reads what to ask as JSON from stdin and
// writes what was answered, case by case, as JSON to stdout; the judging is done by who runs it.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const given = JSON.parse(readFileSync(0, "utf8"));
const client = new OpenAI({ baseURL: given.url, apiKey: "none", maxRetries: 0, timeout: given.timeout });
const ask = { model: given.model, ...given.ask };

const whole = (more, from = client) => from.chat.completions.create({ ...ask, ...more });

async function collect(more) {
  const chunks = [];
  for await (const chunk of await whole({ ...more, stream: true })) chunks.push(chunk);
  return chunks;
}

// The answer, or the error that it was refused with.
async function tried(promise) {
  try {
    return await promise;
  } catch (error) {
    return { kind: error.constructor.name, status: error.status, code: error.code, message: error.message };
  }
}

const cases = {
  async models() {
    const ids = [];
    for await (const model of client.models.list()) ids.push(model.id);
    return ids;
  },
  whole: () => whole({}),
  provenance: () => tried(whole({ include_provenance: true })),
  streamed: () => collect({}),
  usage: () => collect({ stream_options: { include_usage: true } }),
  two: () => whole({ n: 2, temperature: 1 }),
  seeds: () => Promise.all([0, 0, 1].map((more) => whole({ seed: ask.seed + more, temperature: 1 }))),
  stop: () => whole({ stop: [given.stop, "zzz"] }),
  logprobs: () => whole({ logprobs: true, top_logprobs: 3 }),
  tool_required: () => whole({ tools: given.tools, tool_choice: "required", max_tokens: 100 }),
  tool_named: () => whole({ tools: given.tools, tool_choice: given.named, max_tokens: 100 }),
  tool_streamed: () => collect({ tools: given.tools, tool_choice: "required", max_tokens: 100 }),
  schema: () => whole({ response_format: given.format, max_tokens: 100, logit_bias: given.no_space }),
  wrong_model: () => tried(whole({ model: "gpt-4" })),
  too_long: () => tried(whole({ messages: [{ role: "user", content: given.long }] })),
  prediction: () => tried(whole({ prediction: { type: "content", content: given.predicted } })),
  async leave() {
    const other = new OpenAI({ baseURL: given.long_url, apiKey: "none", maxRetries: 0 });
    const stream = await whole({ max_tokens: given.long_tokens, logit_bias: given.endless, stream: true }, other);
    for await (const chunk of stream) return chunk.object; // leaving the loop ends the request
  },
};

const told = {};
for (const [name, run] of Object.entries(cases)) told[name] = await run();
process.stdout.write(JSON.stringify(told));
