// The page: puts its parts together.

import { Announcer } from "./announcer.js";
import { Api, words } from "./api.js";
import { TokenCard } from "./card.js";
import { Composer } from "./composer.js";
import { $, drawIcons, make } from "./dom.js";
import { Drawer, Tabs } from "./drawer.js";
import { EXAMPLES } from "./examples.js";
import { Figures } from "./figures.js";
import { Log } from "./log.js";
import { showCard } from "./model_card.js";
import { Monitor } from "./monitor.js";
import { Session } from "./session.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Store } from "./store.js";

const THEMES = ["auto", "light", "dark"];

drawIcons();
const store = new Store(() => localStorage);
const settings = new Settings($("settings"), store);
const api = new Api(() => settings.key);
const figures = new Figures();
const log = new Log($("log"));
const panel = new Drawer($("panel"), $("open-panel"), "(width >= 1200px)");
const drawer = new Drawer($("sidebar"), $("open-sidebar"), "(width >= 900px)");
const tabs = new Tabs($("tabs"));
let models = []; // the server's; empty until it has told

const composer = new Composer({ onSend: send, onStop: () => session.abort(), last: () => session.lastPrompt });
const announcer = new Announcer($("announcer"));
const session = new Session({ api, settings, store, figures, announcer, composer, log }, {
  ready,
  kept: showConversations,
  busy: (on) => $("log").setAttribute("aria-busy", on),
  needsKey: askForKey,
  server: () => ({ model: settings.model || "model", drafter: models[0]?.drafter ?? "" }),
});
const sidebar = new Sidebar(store, {
  onOpen: open,
  onRemove: (id) => {
    session.forget(id);
    showConversations();
  },
  onRename: (id, title) => {
    if (id === session.conversation.id) session.conversation.title = title;
  },
});
const card = new TokenCard($("card"), $("log"), $("composer"), (span) => {
  if (span) log.hold(); // a token in focus stays in view
  const round = span ? span.dataset.round : null;
  for (const answer of session.answers) answer.tokens?.mark(answer.element.contains(span) ? round : null);
  figures.strip.mark(figures.answer?.element.contains(span) ? Number(round) : null);
});
const monitor = new Monitor($("panel"), api, tellState);

function send(prompt, kind) {
  const sent = session.send(prompt, kind);
  showWelcome();
  return sent;
}

/** Whether the settings can be sent; shows the first that cannot. */
function ready() {
  const wrong = settings.wrong();
  if (!wrong) return true;
  openSettings();
  wrong.reportValidity();
  return false;
}

/** Opens a conversation by its id; a new one where there is none. */
function open(id) {
  card.hide();
  session.open(id);
  drawer.leave();
  showConversations();
  composer.focus();
}

function showConversations() {
  sidebar.show(session.conversation.id);
  showWelcome();
}

function showWelcome() {
  $("welcome").hidden = session.exchanges.length > 0;
}

function openSettings() {
  panel.set(true);
  tabs.select("tab-settings");
}

function askForKey() {
  openSettings();
  settings.field.key.focus();
}

function offerExamples() {
  for (const { title, about, prompt } of EXAMPLES) {
    const element = make("button", "example");
    element.type = "button";
    element.append(make("strong", "", title), make("span", "", about));
    element.addEventListener("click", () => composer.fill(prompt));
    $("examples").append(element);
  }
}

/** Shows answers as text or as tokens. */
function showView() {
  const tokens = settings.field.view.value === "tokens";
  $(tokens ? "view-tokens" : "view-text").checked = true;
  $("legend").hidden = !tokens;
  card.hide();
  session.showTokens(tokens);
}

function showTheme() {
  const theme = settings.field.theme.value;
  document.documentElement.dataset.theme = theme;
  $("theme").setAttribute("aria-label", `Colour scheme: ${theme}`);
  $("theme").title = `Colour scheme: ${theme}`;
}

/** Sets a setting that has a control of its own. */
function set(name, value) {
  settings.field[name].value = value;
  settings.field[name].dispatchEvent(new Event("change", { bubbles: true }));
}

/** Fetches the server's models. */
async function greet() {
  models = await api.models();
  settings.offer(models);
  showCard($("model-card"), models[0]);
  $("fact-model").textContent = settings.model;
  $("fact-drafter").textContent = models[0].drafter ?? "";
  offerRace(api.missing.speculation);
}

/** A race needs an engine that drafts for one request and not for another. `why` it has none; undefined where it does. */
function offerRace(why) {
  if (why) $("mode-chat").click();
  $("mode-race").disabled = Boolean(why);
  $("mode-race").parentElement.title = why ?? "";
}

let refused = false; // whether the last request was refused for its key

/** After each scrape of /metrics: shows whether the server answers and accepts the key. */
async function tellState(error) {
  let wrong = error;
  if (!wrong && !models.length) await greet().catch((caught) => (wrong = caught));
  if (wrong?.status === 401 && !refused) askForKey();
  refused = wrong?.status === 401;
  const state = wrong ? words(wrong) : "ready";
  if ($("fact-server").textContent !== state) $("fact-server").textContent = state; // announced when it changes
  $("server").className = `server ${!wrong ? "ready" : wrong.status === 503 ? "" : "bad"}`; // 503: it loads
}

$("log").addEventListener("click", (event) => {
  const answer = session.answers.find((each) => each.element.contains(event.target));
  if (answer && !session.stop) figures.show(answer, 0);
});
$("new").addEventListener("click", () => open(""));
$("theme").addEventListener("click", () => {
  set("theme", THEMES[(THEMES.indexOf(settings.field.theme.value) + 1) % THEMES.length]);
  showTheme();
});
for (const view of ["text", "tokens"]) {
  $(`view-${view}`).addEventListener("change", () => {
    set("view", view);
    showView();
  });
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") for (const help of document.querySelectorAll("details.help[open]")) help.open = false;
});
settings.field.key.addEventListener("change", () => monitor.start());
settings.field.model.addEventListener("change", () => ($("fact-model").textContent = settings.model));

$("legend").open = matchMedia("(width >= 600px)").matches; // folded on a phone
offerExamples();
showTheme();
showView();
showConversations();
monitor.start();
composer.focus();
