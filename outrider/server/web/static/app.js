// The page: a conversation, the metrics of the current answer, and the server's metrics over time.

import { Announcer } from "./announcer.js";
import { Api, words } from "./api.js";
import { TokenCard } from "./card.js";
import { Exchange, Side } from "./exchange.js";
import { Monitor } from "./monitor.js";
import { digits } from "./run.js";
import { randomSeed, Settings } from "./settings.js";
import { Strip } from "./strip.js";

const $ = (id) => document.getElementById(id);
const now = () => performance.now();

const settings = new Settings($("settings"));
const api = new Api(() => settings.key);
const announcer = new Announcer($("announcer"));
const strip = new Strip($("strip"), $("strip-caption"), (round) => shown?.view.mark(round));
const card = new TokenCard($("card"), $("log"), (span) => {
  if (span) following = false; // a token in focus stays in view
  const inShown = span && shown?.view.element.contains(span);
  for (const side of sides) side.view.mark(span && side.view.element.contains(span) ? span.dataset.round : null);
  strip.mark(inShown ? Number(span.dataset.round) : null);
});

const sides = []; // every answer on the page
let history = []; // the conversation so far, as messages
let shown = null; // the answer whose rounds and metrics are shown beside the conversation
let exchange = null; // the last question and its answers
let following = false; // whether the log scrolls with new text
let greeted = false; // whether the server's model is known
let refused = false; // whether the last request was refused for its key
let stop = null; // the AbortController of the answers being written; null when idle

/** Requests one answer and shows it as it arrives. Throws on an error; what has arrived stays shown. */
async function answer(side, body, signal) {
  side.run.begin(now());
  try {
    for await (const chunk of api.chat({ ...body, include_provenance: true }, signal)) {
      side.add(chunk, now());
      if (side === shown) announcer.add(chunk.choices[0]?.delta?.content ?? "");
    }
  } catch (error) {
    if (error.name !== "AbortError") side.fail(words(error));
    throw error;
  } finally {
    side.close(now(), { seed: body.seed, stopped: signal.aborted });
    show(side);
  }
}

/** Shows an answer's rounds and metrics beside the conversation. */
function show(side) {
  if (!side.element.isConnected) return; // the conversation has been cleared since
  shown = side;
  draw();
}

function draw() {
  if (!shown) return;
  shown.tick(now());
  strip.show(shown.run.rounds);
  const f = shown.run.figures(now());
  const said = {
    rate: digits(f.rate, 1),
    alpha: digits(f.alpha, 2),
    tau: digits(f.tau, 2),
    tokens: f.tokens,
    rounds: f.rounds,
    drafted: f.drafted,
    accepted: f.accepted,
    first: digits(f.firstMs, 0),
    clock: digits(f.seconds, 2),
  };
  for (const [name, text] of Object.entries(said)) $(`figure-${name}`).textContent = text;
}

/** Runs `work(signal)` with the Stop button in place and the clocks moving. */
async function busy(running, work) {
  stop = new AbortController();
  setBusy(true);
  following = true;
  const timer = setInterval(() => {
    draw();
    if (following) exchange.follow();
    for (const side of running) if (side.run.began !== null) side.tick(now());
  }, 60);
  try {
    await work(stop.signal);
    return true;
  } catch (error) {
    if (error.status === 401) askForKey();
    return error.name === "AbortError";
  } finally {
    clearInterval(timer);
    stop.abort(); // where one of two fails, the other is stopped
    stop = null;
    setBusy(false);
    draw();
    if (following) exchange.follow();
    announcer.flush();
  }
}

function setBusy(on) {
  const hadFocus = document.activeElement === $("stop");
  $("send").hidden = on;
  $("stop").hidden = !on;
  $("log").setAttribute("aria-busy", on);
  if (hadFocus) $("prompt").focus();
}

function messagesFor(prompt, before) {
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  return [...system, ...before, { role: "user", content: prompt }];
}

async function chat(prompt) {
  const plain = !$("speculate").checked;
  const side = newSide(plain ? "Plain" : "Speculative", `Answer ${sides.length + 1}`);
  exchange = new Exchange($("log"), prompt, [side]);
  show(side);
  const body = { ...settings.sampling(), messages: messagesFor(prompt, history), speculation: { off: plain } };
  const went = await busy([side], (signal) => answer(side, body, signal));
  if (!went) giveBack(prompt);
  else if (side.run.text && side.element.isConnected) {
    history = [...history, { role: "user", content: prompt }, { role: "assistant", content: side.run.text }];
  }
}

/** The same prompt and seed twice, each with a cache salt of its own. */
async function compare(prompt) {
  const pair = ["Plain", "Speculative"].map((title) => newSide(title, `${title} answer ${sides.length + 1}`));
  exchange = new Exchange($("log"), prompt, pair);
  const common = { ...settings.sampling(), messages: messagesFor(prompt, []) };
  const salt = randomSeed();
  const bodies = pair.map((_, i) => ({ ...common, cache_salt: `page-${salt}-${i}`, speculation: { off: i === 0 } }));
  show(pair[0]);
  const went = await busy(pair, async (signal) => {
    if ($("together").checked) {
      show(pair[1]);
      await Promise.all(pair.map((side, i) => answer(side, bodies[i], signal)));
    } else {
      await answer(pair[0], bodies[0], signal);
      show(pair[1]);
      await answer(pair[1], bodies[1], signal);
    }
    exchange.compare(...pair);
  });
  if (!went) giveBack(prompt);
}

function newSide(title, label) {
  const side = new Side(title, label);
  sides.push(side);
  return side;
}

/** After an error the prompt is kept, to be sent again. */
function giveBack(prompt) {
  if (!$("prompt").value) $("prompt").value = prompt;
}

function askForKey() {
  $("settings-panel").open = true;
  settings.field.key.focus();
}

function send() {
  const prompt = $("prompt").value;
  if (stop || !prompt.trim()) return;
  const wrong = settings.wrong();
  if (wrong) {
    $("settings-panel").open = true;
    wrong.reportValidity();
    return;
  }
  $("prompt").value = "";
  $("welcome")?.remove();
  announcer.clear();
  if ($("mode-compare").checked) compare(prompt);
  else chat(prompt);
}

function startOver() {
  stop?.abort();
  history = [];
  shown = null;
  sides.length = 0;
  card.hide();
  $("log").replaceChildren();
  strip.show([]);
  $("prompt").focus();
}

/** Fetches the server's models. */
async function greet() {
  const models = await api.models();
  settings.offer(models);
  $("fact-model").textContent = settings.field.model.value;
  $("fact-drafter").textContent = models[0].drafter;
  greeted = true;
}

/** After each scrape of /metrics: shows whether the server answers and accepts the key. */
async function tellState(error) {
  let wrong = error;
  if (!wrong && !greeted) await greet().catch((caught) => (wrong = caught));
  if (wrong?.status === 401 && !refused) askForKey();
  refused = wrong?.status === 401;
  const state = wrong ? words(wrong) : "ready";
  if ($("fact-server").textContent !== state) $("fact-server").textContent = state; // announced when it changes
  $("fact-server").classList.toggle("bad", wrong !== null);
}

const monitor = new Monitor($("figures"), api, tellState);

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
  if (event.key === "Escape") stop?.abort();
});
for (const name of ["wheel", "touchmove"]) {
  $("log").addEventListener(name, () => (following = false), { passive: true });
}
$("stop").addEventListener("click", () => stop?.abort());
$("clear").addEventListener("click", startOver);
$("settings").addEventListener("submit", (event) => event.preventDefault());
settings.field.key.addEventListener("change", () => monitor.start());
settings.field.model.addEventListener("change", () => ($("fact-model").textContent = settings.field.model.value));
for (const radio of document.getElementsByName("mode")) {
  radio.addEventListener("change", () => {
    $("together-row").hidden = !$("mode-compare").checked;
    $("speculate-row").hidden = $("mode-compare").checked;
  });
}
monitor.start();
