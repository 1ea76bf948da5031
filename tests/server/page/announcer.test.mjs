import assert from "node:assert/strict";
import test from "node:test";

const { sentences } = await import(process.env.PAGE + "/announcer.js");

test("whole sentences and lines are said, the rest waits", () => {
  assert.deepEqual(sentences("One. Two is 3.5 long! def f():\n  ret"), {
    whole: ["One.", "Two is 3.5 long!", "def f():"],
    rest: "ret",
  });
  assert.deepEqual(sentences("\n\nA"), { whole: [], rest: "A" });
});
