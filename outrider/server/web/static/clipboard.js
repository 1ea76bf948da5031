// Copying to the clipboard, and files to keep.

import { button, make } from "./dom.js";

const SHOWN = 1600; // milliseconds that "Copied" stays

/** A button that copies what `text()` returns and says whether it did. */
export function copyButton(label, text) {
  const element = button(label, "copy", async () => {
    const done = await copy(text());
    const words = element.lastChild;
    words.textContent = done ? "Copied" : "Not allowed";
    words.setAttribute("role", "status");
    setTimeout(() => {
      words.textContent = label;
      words.removeAttribute("role");
    }, SHOWN);
  });
  return element;
}

/** Whether the text was copied. Without TLS, browsers offer only the old command. */
async function copy(text) {
  try {
    if (!navigator.clipboard) return copyByCommand(text);
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyByCommand(text);
  }
}

function copyByCommand(text) {
  const before = document.activeElement;
  const area = make("textarea", "visually-hidden");
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  before?.focus();
  return done;
}

/** Offers a text as a file. */
export function download(name, text, type) {
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 0);
}
