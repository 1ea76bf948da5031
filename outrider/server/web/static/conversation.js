// Conversations as data: turns of a prompt and its answers; their history, titles and exports. No DOM.
//
// A turn is { kind: "chat" | "race", prompt, answers }. An answer is { name, model, off, drafter, seed, finish, stopped,
// error, run }, where run is what Run.toStored returns.

import { Run } from "./run.js";
import { summaryLine } from "./summary.js";

const MAX_TITLE = 48;

export function newConversation(now = Date.now()) {
  const id = [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "", created: now, updated: now, turns: [] };
}

/** A title out of a prompt: its first line with text, cut at a word. */
export function titleOf(prompt) {
  const line = prompt.split("\n").find((each) => each.trim())?.trim() ?? "";
  if (line.length <= MAX_TITLE) return line;
  const cut = line.slice(0, MAX_TITLE);
  return `${cut.slice(0, cut.lastIndexOf(" ") > 20 ? cut.lastIndexOf(" ") : MAX_TITLE)} …`;
}

/** The messages before a new prompt. A race is not part of the conversation. */
export function historyOf(turns) {
  return turns
    .filter((turn) => turn.kind === "chat" && turn.answers[0]?.run.text)
    .flatMap((turn) => [
      { role: "user", content: turn.prompt },
      { role: "assistant", content: turn.answers[0].run.text },
    ]);
}

/** Whether something read back has the shape of a conversation. */
export function isConversation(value) {
  return typeof value?.id === "string" && Array.isArray(value.turns) && value.turns.every(isTurn);
}

function isTurn(turn) {
  const isRun = (run) => typeof run?.text === "string" && Array.isArray(run.tokens);
  return typeof turn?.prompt === "string" && Array.isArray(turn.answers) && turn.answers.every((each) => isRun(each.run));
}

export function toJson(conversation) {
  return JSON.stringify(conversation, null, 2);
}

export function toMarkdown(conversation) {
  const parts = [`# ${conversation.title}`];
  for (const turn of conversation.turns) {
    parts.push("## You", turn.prompt);
    for (const answer of turn.answers) {
      const name = turn.kind === "race" ? `${answer.model} (${answer.name})` : answer.model;
      const line = summaryLine(Run.fromStored(answer.run).figures(0), answer);
      parts.push(`## ${name}`, answer.run.text);
      if (line) parts.push(`*${line}*`);
    }
  }
  return `${parts.join("\n\n")}\n`;
}

/** A file name for an export. */
export function fileName(conversation, extension) {
  const name = conversation.title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
  return `${name || "conversation"}.${extension}`;
}
