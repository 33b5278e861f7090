// Keeps what a reader writes. Each run ends a version, and each tab writes its own, so that nothing is overwritten.
"use strict";
const PREFIX = "sbus "; // other sites on the same address may keep things too
const VERSIONS_MAX = 40; // of an editor
const VERSIONS_MIN = 3; // that stay when there is no room
const RIGHT_MARK = "✓ "; // before what the kit said of a version that passed
const UNKEPT = "Your browser does not keep this. Download it before you leave the page.";

const tried = (act) => { try { return act() ?? ""; } catch { return null; } };

// What the browser keeps; what it refuses, this page remembers for as long as it is open
const refused = new Map();
const store = {
  get: (name) => refused.get(name) ?? tried(() => localStorage.getItem(PREFIX + name)) ?? "",
  set(name, value) { // returns whether the browser keeps it
    const isKept = tried(() => localStorage.setItem(PREFIX + name, value)) !== null;
    if (isKept) refused.delete(name);
    else refused.set(name, value);
    return isKept;
  },
  remove(name) {
    refused.delete(name);
    tried(() => localStorage.removeItem(PREFIX + name));
  },
  names(start) {
    const kept = (tried(() => Object.keys(localStorage)) || []).filter((key) => key.startsWith(PREFIX));
    const names = [...kept.map((key) => key.slice(PREFIX.length)), ...refused.keys()];
    return [...new Set(names)].filter((name) => name.startsWith(start)).sort();
  },
};

// ---- Versions: the key ends in the time; the value is a line with what the kit said, and the text

const isRight = ({ said }) => said.startsWith(RIGHT_MARK);
const versionsOf = (name) => store.names(`work ${name} `).map((key) => {
  const [said, ...lines] = store.get(key).split("\n");
  return { key, said, text: lines.join("\n") };
});
const newest = (name, isWanted = () => true) => versionsOf(name).findLast(isWanted)?.text;
// What this tab had last, also after a reload; or else the newest of all tabs
const latest = (name) => newest(name, ({ key }) => key === tried(() => sessionStorage.getItem(PREFIX + name))) ?? newest(name);

// Replaces what is in a field so that Ctrl+Z takes it back
function put(field, text) {
  const { activeElement } = document;
  field.focus({ preventScroll: true });
  field.select();
  const isDone = document.execCommand(text ? "insertText" : "delete", false, text) && field.value === text;
  if (!isDone) {
    field.value = text;
    field.dispatchEvent(new Event("input"));
  }
  if (activeElement === document.body) field.blur();
  else activeElement.focus({ preventScroll: true });
}

// Keeps a field under a name; starts are texts to begin with, by their labels.
// Returns what is called when a run begins; that returns what is called with its outcome.
function keep(field, name, starts, file) {
  const bar = document.createElement("div");
  let mine, hasRun; // the key of the version that this tab writes, and whether the next text begins another
  bar.className = "work";
  bar.innerHTML = `<p><label>Go back to <select></select></label>
    ${each(Object.keys(starts), (label) => `<button type="button">${escaped(label)}</button>`)}</p>
    <details><summary>Keep a copy</summary><p><a href="#">Download this</a> <a href="#">Download all my work</a>
    <label>Open a file <input type="file"></label></p></details><p role="status"></p>`;
  (field.closest(".code") ?? field).after(bar);
  const [choice, opened, told] = bar.querySelectorAll("select, input, [role]"), [link, all] = bar.querySelectorAll("a");

  const list = () => {
    const own = versionsOf(name).reverse();
    choice.replaceChildren(new Option(own.length ? "…" : "nothing yet"), ...own.map(({ key, said, text }) => {
      const time = new Date(key.slice(-24)).toLocaleString([], { dateStyle: "medium", timeStyle: "medium" });
      return new Option(`${time} ${said.slice(0, 60)}`, text);
    }));
  };
  const tell = (text, look = "") => Object.assign(told, { textContent: text, className: look });

  const write = (key, said, text) => {
    const others = versionsOf(name), right = others.findLast(isRight);
    const spare = others.filter((version) => version.key !== key && version !== right);
    while (spare.length >= VERSIONS_MAX) store.remove(spare.shift().key);
    while (!store.set(key, `${said}\n${text}`) && spare.length > VERSIONS_MIN) store.remove(spare.shift().key);
    tried(() => sessionStorage.setItem(PREFIX + name, key));
    tell(refused.has(key) ? UNKEPT : "", "bad");
    list();
  };
  const fresh = () => `work ${name} ${new Date().toISOString()}`;

  field.addEventListener("input", () => {
    if (!mine || hasRun) [mine, hasRun] = [fresh(), false];
    write(mine, "", field.value);
  });
  const replace = (text) => {
    mine = undefined;
    field.hidden = false;
    put(field, text);
  };
  choice.onchange = () => choice.selectedIndex && replace(choice.value);
  bar.querySelectorAll("button").forEach((button, n) => (button.onclick = () => replace(Object.values(starts)[n])));

  const download = (which, contents, called) => {
    which.href = URL.createObjectURL(new Blob([contents]));
    which.download = called;
  };
  link.onclick = () => download(link, field.value, file);
  all.onclick = () => download(all, JSON.stringify(Object.fromEntries(store.names("work ").map((key) => [key, store.get(key)]))), "sbus-book.json");
  opened.onchange = async () => {
    const text = await opened.files[0].text(), works = text.startsWith('{"work ') && tried(() => JSON.parse(text));
    opened.value = "";
    if (!works) return replace(text);
    const added = Object.entries(works).filter(([key]) => !store.get(key));
    const lost = added.filter(([key, value]) => !store.set(key, `${value}`));
    list();
    tell(lost.length ? UNKEPT : `Versions that were added: ${added.length}.`, lost.length ? "bad" : "");
  };
  window.addEventListener("storage", ({ key }) => {
    if (!key?.startsWith(`${PREFIX}work ${name} `)) return;
    list();
    tell("Another tab is working on this as well. Both texts are kept: the other is the newest version to go back to.");
  });
  list();

  return () => {
    mine ??= fresh();
    hasRun = true;
    const [key, text] = [mine, field.value];
    return (said, passed) => write(key, (passed ? RIGHT_MARK : "") + said.replaceAll("\n", " "), text);
  };
}

window.addEventListener("beforeunload", (event) => {
  if ([...refused.keys()].some((name) => name.startsWith("work stage"))) event.preventDefault();
});
