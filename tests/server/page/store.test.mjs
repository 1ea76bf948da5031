import assert from "node:assert/strict";
import test from "node:test";

const { Store } = await import(process.env.PAGE + "/store.js");
const conversations = await import(process.env.PAGE + "/conversation.js");
const { Run } = await import(process.env.PAGE + "/run.js");

/** A browser's storage of so many characters. */
class Room {
  items = new Map();
  constructor(size = Infinity) {
    this.size = size;
  }
  getItem(key) {
    return this.items.get(key) ?? null;
  }
  setItem(key, text) {
    const others = [...this.items].reduce((sum, [each, value]) => sum + (each === key ? 0 : value.length), 0);
    if (others + text.length > this.size) throw new DOMException("full", "QuotaExceededError");
    this.items.set(key, text);
  }
  removeItem(key) {
    this.items.delete(key);
  }
}

function answer(text) {
  const run = new Run();
  run.begin(0);
  const entry = { token: text, token_id: 7, origin: "accepted", drafter: "suffix", round: 1, position: 2, drafted: 3 };
  run.add([{ ...entry, draft_prob: 0.5, target_prob: null }], text, 100);
  run.end(250);
  return { name: "", model: "m", off: false, drafter: "suffix", seed: 5, run: run.toStored() };
}

function talk(title, text = "hi") {
  const turn = { kind: "chat", prompt: `ask ${title}`, answers: [answer(text)] };
  return { ...conversations.newConversation(1), title, turns: [turn] };
}

test("conversations come back as they were, the newest first", () => {
  const room = new Room();
  const [first, second] = [talk("one"), talk("two")];
  const store = new Store(() => room);
  store.save(first);
  store.save(second);
  const again = new Store(() => room);
  assert.deepEqual(again.list().map((each) => each.title), ["two", "one"]);
  assert.deepEqual(again.load(first.id), first);
  assert.equal(again.problem, "");
  again.rename(first.id, "other");
  assert.deepEqual(again.list().map((each) => each.title), ["two", "other"]);
  assert.equal(again.load(first.id).title, "other");
  again.save(first);
  assert.deepEqual(again.list().map((each) => each.title), ["one", "two"]);
  again.remove(second.id);
  assert.equal(again.load(second.id), null);
  assert.deepEqual([...room.items.keys()].filter((key) => key.includes(second.id)), []);
});

test("a forbidden storage: memory, and a line that says so", () => {
  const store = new Store(() => {
    throw new DOMException("denied", "SecurityError");
  });
  assert.match(store.problem, /does not let the page keep/);
  const kept = talk("one");
  store.save(kept);
  store.saveSettings({ seed: "3" });
  assert.deepEqual(store.load(kept.id), kept);
  assert.deepEqual(store.list().map((each) => each.title), ["one"]);
  assert.deepEqual(store.settings(), { seed: "3" });
});

test("a full storage: the rest in memory until something is deleted", () => {
  const room = new Room(2500);
  const store = new Store(() => room);
  const [first, second] = [talk("one", "x".repeat(700)), talk("two", "y".repeat(700))];
  store.save(first);
  assert.equal(store.problem, "");
  store.save(second);
  assert.match(store.problem, /storage is full/);
  assert.deepEqual(store.load(second.id), second);
  store.remove(first.id);
  assert.equal(store.problem, "");
  assert.deepEqual(new Store(() => room).load(second.id), second);
});

test("what is not the page's own is ignored", () => {
  const room = new Room();
  for (const text of ["{oops", "5", '"x"', "null", '{"id":"a","turns":[{"prompt":1}]}', '{"id":"a","turns":[{"prompt":"x","answers":[{}]}]}']) {
    room.items.set("outrider-conversations", text);
    room.items.set("outrider-conversation-a", text);
    room.items.set("outrider-settings", text);
    const store = new Store(() => room);
    assert.deepEqual(store.list(), [], text);
    assert.equal(store.load("a"), null, text);
    assert.equal(typeof store.settings(), "object", text);
  }
});

test("an answer is kept with its tokens and times", () => {
  const run = Run.fromStored(JSON.parse(JSON.stringify(answer("hi").run)));
  assert.equal(run.text, "hi");
  assert.deepEqual(run.tokens, [
    { token: "hi", token_id: 7, origin: "accepted", drafter: "suffix", round: 1, position: 2, drafted: 3, draft_prob: 0.5, target_prob: null },
  ]);
  const { seconds, firstMs, drafted, accepted } = run.figures(9);
  assert.deepEqual([seconds, firstMs, drafted, accepted], [0.25, 100, 3, 1]);
});

test("the history of a conversation leaves races and empty answers out", () => {
  const { turns } = talk("one");
  const race = { kind: "race", prompt: "r", answers: [answer("a"), answer("a")] };
  const said = conversations.historyOf([...turns, race, { kind: "chat", prompt: "q", answers: [answer("")] }]);
  assert.deepEqual(said, [{ role: "user", content: "ask one" }, { role: "assistant", content: "hi" }]);
});

test("titles, file names and exports", () => {
  assert.equal(conversations.titleOf("\n  Short one \nrest"), "Short one");
  const long = conversations.titleOf("Rename the variable in this Python code and write it out again");
  assert.equal(long, "Rename the variable in this Python code and …");
  const kept = talk("Rivers & lakes!");
  assert.equal(conversations.fileName(kept, "md"), "rivers-lakes.md");
  assert.equal(conversations.fileName({ title: "…" }, "json"), "conversation.json");
  assert.deepEqual(JSON.parse(conversations.toJson(kept)), kept);
  const text = "# Rivers & lakes!\n\n## You\n\nask Rivers & lakes!\n\n## m\n\nhi\n\n*1 token in 1 pass · 1.0 tokens per pass*\n";
  assert.equal(conversations.toMarkdown(kept), text);
});
