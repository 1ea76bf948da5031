// npm's `ai` with `@ai-sdk/openai-compatible` against a running server. Reads what to ask as JSON from stdin and
// writes what was answered, case by case, as JSON to stdout; the judging is done by who runs it.
import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";
import { z } from "zod";

const given = JSON.parse(readFileSync(0, "utf8"));
const options = { name: "outrider", baseURL: given.url, apiKey: "none", includeUsage: true };
const provider = createOpenAICompatible({ ...options, supportsStructuredOutputs: true });
const ask = {
  model: provider(given.model),
  instructions: given.system,
  prompt: given.prompt,
  seed: given.seed,
  maxOutputTokens: given.max_tokens,
  temperature: given.temperature,
  maxRetries: 0,
};
const long = { ...ask, maxOutputTokens: 100 };
const biased = (logit_bias) => ({ ...long, providerOptions: { outrider: { logit_bias } } });
const tools = {
  look: tool({
    description: "Look somewhere.",
    inputSchema: jsonSchema(given.parameters),
    execute: async ({ at, times }) => `${at} ${times}`,
  }),
};
const schemas = {
  plain: z.strictObject({ at: z.enum(["sea", "sky"]), times: z.literal([1, 2, 3]) }),
  record: z.record(z.enum(["sea", "sky"]), z.literal([1, 2, 3])),
  open_record: z.record(z.string().regex(/^[a-c]{1,2}$/), z.literal([1, 2, 3])),
};

async function collect(stream) {
  const pieces = [];
  for await (const piece of stream) pieces.push(piece);
  return pieces;
}

async function structured(schema, bias) {
  try {
    return (await generateText({ ...biased(bias), output: Output.object({ schema }) })).output;
  } catch (error) {
    return { error: error.message, text: error.text };
  }
}

async function thrown(promise) {
  try {
    await promise;
  } catch (error) {
    return { name: error.name, status: error.statusCode, message: error.message };
  }
  return null;
}

const called = ({ toolCalls, toolResults, finishReason }) => ({
  call: toolCalls.map(({ toolName, input }) => [toolName, input]),
  result: toolResults.map(({ output }) => output),
  finish: finishReason,
});

const cases = {
  async whole() {
    const { text, finishReason, usage } = await generateText(ask);
    return { text, finishReason, usage };
  },
  async streamed() {
    const result = streamText(ask);
    const pieces = await collect(result.textStream);
    return { pieces, finishReason: await result.finishReason, usage: await result.usage };
  },
  tool: async () => called(await generateText({ ...long, tools, toolChoice: "required" })),
  named: async () => called(await generateText({ ...long, tools, toolChoice: { type: "tool", toolName: "look" } })),
  async tool_streamed() {
    const result = streamText({ ...long, tools, toolChoice: "required" });
    await collect(result.fullStream);
    const [toolCalls, toolResults] = [await result.toolCalls, await result.toolResults];
    return called({ toolCalls, toolResults, finishReason: await result.finishReason });
  },
  plain: () => structured(schemas.plain, given.no_space),
  record: () => structured(schemas.record, given.record_bias),
  open_record: () => structured(schemas.open_record, given.record_bias),
  comma: () => structured(schemas.record, given.no_space),
  async object_streamed() {
    const result = streamText({ ...biased(given.no_space), output: Output.object({ schema: schemas.plain }) });
    await collect(result.partialOutputStream);
    return await result.output;
  },
  wrong_model: () => thrown(generateText({ ...ask, model: provider("gpt-4") })),
  too_long: () => thrown(generateText({ ...ask, prompt: given.long })),
};

const told = { schemas: Object.fromEntries(Object.entries(schemas).map(([name, s]) => [name, z.toJSONSchema(s)])) };
for (const [name, run] of Object.entries(cases)) told[name] = await run();
process.stdout.write(JSON.stringify(told));
