// Prompts for the first screen. Their answers repeat much of the prompt, so that drafts are accepted.

export const EXAMPLES = [
  {
    title: "Rename in code",
    about: "Write out a function again with one name changed",
    prompt: `Rename \`x\` to \`price\` in this Python code and write out the whole code again:

\`\`\`python
def add_tax(x, rate):
    tax = x * rate
    return x + tax

def discount(x, percent):
    off = x * percent / 100
    return x - off

def final(x, rate, percent):
    x = discount(x, percent)
    x = add_tax(x, rate)
    return round(x, 2)
\`\`\``,
  },
  {
    title: "Extract to JSON",
    about: "Four orders as records",
    prompt: `Extract the orders as a JSON array with the keys "name", "city", "item" and "amount". Write only the JSON.

Maria Jensen from Copenhagen ordered 3 oak chairs.
Tomás Oliveira from Lisbon ordered 12 copper lamps.
Aiko Tanaka from Osaka ordered 1 walnut desk.
Peter Novak from Prague ordered 6 linen curtains.`,
  },
  {
    title: "Edit a message",
    about: "Move a meeting, leave the rest as it is",
    prompt: `Move the meeting from Tuesday at 10:00 to Thursday at 14:30 and change nothing else. Write out the whole message.

Dear all,

the project meeting takes place on Tuesday at 10:00 in room 204. Please bring the figures of your team for the third quarter, and send me any points for the agenda by Monday evening. Sandra will take the minutes, and Ahmed will present the plan for the new warehouse.

If you cannot come on Tuesday at 10:00, please let me know so that we can call you.

Best regards,
Helena`,
  },
  {
    title: "Reformat a list",
    about: "Books as a numbered list",
    prompt: `Write these books as a numbered list, one on each line:

Pride and Prejudice by Jane Austen, Moby-Dick by Herman Melville, Middlemarch by George Eliot, Dracula by Bram Stoker, The Time Machine by H. G. Wells`,
  },
  {
    title: "CSV to a table",
    about: "Cities and their rivers",
    prompt: `Turn this CSV into a Markdown table:

city,country,population,river
Vienna,Austria,2028000,Danube
Budapest,Hungary,1686000,Danube
Paris,France,2103000,Seine
Cologne,Germany,1087000,Rhine
Porto,Portugal,248000,Douro`,
  },
  {
    title: "Correct the spelling",
    about: "A paragraph with four mistakes",
    prompt: `Correct the spelling and write out the whole text again:

The outrider rides ahead of the main party and looks at the road. When the rode is clear, the party can follow at full speed. When he is wrong, the party takes the right way insted and has lost only a litle time. Because the party checks every step, it always arives at the same place.`,
  },
];
