import assert from "node:assert/strict";
import test from "node:test";

const { figuresBetween, parseMetrics } = await import(process.env.PAGE + "/metrics.js");

test("labels are summed, comments and rubbish left out", () => {
  const text = [
    "# HELP a_total words 5",
    "# TYPE a_total counter",
    'a_total{drafter="suffix",note="with } and \\" inside"} 3.0',
    'a_total{drafter="mix"} 4.0 1700000000',
    "vllm:b_total 1e3",
    "c NaN",
    "",
    "not a sample",
  ].join("\n");
  const sums = parseMetrics(text);
  assert.equal(sums.get("a_total"), 7);
  assert.equal(sums.get("vllm:b_total"), 1000);
  assert.ok(Number.isNaN(sums.get("c")));
});

function scrape(tokens, drafts, running) {
  const lines = [`outrider_generation_tokens_total ${tokens}`, `outrider_requests_running ${running}`];
  for (const [drafter, [accepted, refused]] of Object.entries(drafts)) {
    lines.push(`outrider_spec_accepted_tokens_total{drafter="${drafter}"} ${accepted}`);
    lines.push(`outrider_spec_refusals_total{drafter="${drafter}"} ${refused}`);
  }
  return parseMetrics(lines.join("\n"));
}

test("figures between two scrapes", () => {
  const before = scrape(100, { suffix: [40, 10] }, 0);
  const after = scrape(180, { suffix: [70, 14], mix: [30, 6] }, 2);
  const figures = figuresBetween(before, after, 4);
  assert.equal(figures.rate, 20);
  assert.equal(figures.alpha, 60 / 70);
  assert.equal(figures.tau, 80 / 20); // 60 of 80 tokens were drafted, so there were 20 passes
  assert.equal(figures.running, 2);
  assert.equal(figures.waiting, null); // this server does not tell
});

test("the first scrape tells what stands, and no rate; an idle time has no ratios", () => {
  const first = figuresBetween(undefined, scrape(5, {}, 1), NaN);
  assert.deepEqual([first.rate, first.alpha, first.tau, first.running], [null, null, null, 1]);
  const idle = figuresBetween(scrape(5, {}, 1), scrape(5, {}, 0), 2);
  assert.deepEqual([idle.rate, idle.alpha, idle.tau], [0, null, null]);
});
