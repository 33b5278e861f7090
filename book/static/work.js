// Keeps what a reader writes. Each run begins a new version, and each tab writes its own, so nothing is overwritten.
const VERSIONS_MAX = 40; // of an editor
const IS_PASSED = /^(Passed|Right)/;

const keysOf = (name) => Object.keys(window.localStorage ?? {}).filter((key) => key.startsWith(`sbus work ${name} `)).sort();
const read = (key) => JSON.parse(stored(key.slice(5)) ?? '["", ""]'); // what was said of a version, and its text
const versionsOf = (name) => { try { return keysOf(name); } catch { return []; } };

// Returns the newest version of a work, or the newest that passed, as a text; or undefined
function newest(name, isWanted = () => true) {
  const key = versionsOf(name).findLast((one) => isWanted(read(one)));
  return key && read(key)[1];
}

// Has a field kept under a name; starts are texts to begin with, by what they are called
function keep(field, name, starts, file) {
  const fold = document.createElement("details");
  let mine; // the version that this tab writes, until the next run
  fold.className = "work";
  fold.innerHTML = `<summary>Versions</summary><p><label>Go back to <select></select></label> <a href="#">Download</a>
    <a href="#">Download all my work</a> <label>Open a file <input type="file"></label></p><p role="status"></p>`;
  (field.closest(".code") ?? field).after(fold);
  const [choice, link, whole, opened, told] = fold.querySelectorAll("select, a, input, [role]");

  const list = () => {
    const own = versionsOf(name).reverse().map((key) => {
      const time = new Date(key.slice(-24)), [said, text] = read(key);
      return [`${time.toLocaleString([], { dateStyle: "medium", timeStyle: "medium" })}${said && `: ${said.slice(0, 60)}`}`, text];
    });
    const all = [...own, ...Object.entries(starts)];
    choice.replaceChildren(new Option("…"), ...all.map(([label, text]) => new Option(label, text)));
    fold.querySelector("summary").textContent = own.length ? `Versions: ${own.length}` : "Versions";
  };

  const write = (said = "") => {
    if (!said && [newest(name), ...Object.values(starts)].includes(field.value)) return;
    mine ??= `work ${name} ${new Date().toISOString()}`;
    const value = JSON.stringify([said, field.value]);
    const others = versionsOf(name).filter((key) => key !== `sbus ${mine}`);
    while (others.length > VERSIONS_MAX) localStorage.removeItem(others.shift());
    while (stored(mine, value) !== value && others.length > 3) localStorage.removeItem(others.shift()); // makes room
    const isKept = stored(mine) === value;
    told.className = isKept ? "" : "bad";
    told.textContent = isKept ? "" : "Your browser has no room for this. Download it before you leave the page.";
    if (!isKept) fold.open = true;
    list();
  };

  const put = (text) => { // so that Ctrl+Z takes it back
    mine = undefined;
    field.hidden = false;
    field.focus();
    field.select();
    if (!document.execCommand("insertText", false, text)) field.value = text;
    field.dispatchEvent(new Event("input"));
    field.dispatchEvent(new Event("change"));
    mine = undefined;
  };

  field.addEventListener("input", () => write());
  choice.onchange = () => choice.selectedIndex && put(choice.value);
  opened.onchange = async () => {
    const text = await opened.files[0].text();
    const all = text.startsWith('{"sbus ') ? JSON.parse(text) : {};
    for (const [key, value] of Object.entries(all)) stored(key.slice(5), stored(key.slice(5)) ?? value);
    if (text.startsWith('{"sbus ')) return list();
    put(text);
  };
  const save = (which, contents, download) => Object.assign(which, { href: URL.createObjectURL(new Blob([contents])), download });
  link.onclick = () => save(link, field.value, file);
  whole.onclick = () => save(whole, JSON.stringify(Object.fromEntries(
    Object.entries(localStorage).filter(([key]) => key.startsWith("sbus ")))), "sbus-book.json");
  window.addEventListener("storage", ({ key }) => {
    if (!key?.startsWith(`sbus work ${name} `)) return;
    list();
    told.textContent = "Another tab has changed this work too. Both texts are kept: the other is the newest version.";
  });
  list();
  return { write, ran(said) { write(said); mine = undefined; } };
}

// Returns the lines of two texts, each with what it is: " " in both, "-" only in the first, "+" only in the second
function difference(...texts) {
  const [one, two] = texts.map((text) => text.trimEnd().split("\n"));
  const same = [...one, ""].map(() => new Uint16Array(two.length + 1)); // lines in common from there on
  for (let i = one.length; i--;)
    for (let j = two.length; j--;)
      same[i][j] = one[i] === two[j] ? same[i + 1][j + 1] + 1 : Math.max(same[i + 1][j], same[i][j + 1]);
  const lines = [];
  for (let i = 0, j = 0; i < one.length || j < two.length;) {
    if (one[i] === two[j]) lines.push([" ", one[i++]]) && j++;
    else if (j === two.length || same[i + 1]?.[j] >= same[i][j + 1]) lines.push(["-", one[i++]]);
    else lines.push(["+", two[j++]]);
  }
  return lines;
}
