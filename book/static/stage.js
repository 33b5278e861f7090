// The page of a stage: an editor for a student's server, which the kit tries
"use strict";
const stage = document.querySelector(".stage");

if (stage) {
  const { program, said } = stage.elements, { defaultValue: start } = program, number = Number(stage.dataset.stage);
  const [gutter, beside] = stage.querySelectorAll(".gutter, .beside"), before = `stage ${number - 1}`;
  const passed = newest(before, isRight);
  const starts = { ...(passed && { [`Start with mine of ${before}`]: passed }), [`Start with the book’s ${before}`]: start };
  let isFree = false; // whether Tab leaves the editor

  const draw = () => {
    gutter.textContent = Array.from(program.value.split("\n"), (_, n) => n + 1).join("\n");
  };
  const show = (line) => {
    const lines = program.value.split("\n"), from = lines.slice(0, line - 1).join("\n").length + (line > 1);
    program.focus();
    program.setSelectionRange(from, from + lines[line - 1].length);
    program.scrollTop = (program.scrollHeight / lines.length) * (line - 8);
  };
  stage.hidden = false; // without scripts it is
  program.value = latest(`stage ${number}`) ?? passed ?? start;
  const run = keep(program, `stage ${number}`, starts, "server.py");
  program.addEventListener("input", () => { outdate(stage); draw(); });
  program.onscroll = () => (gutter.scrollTop = program.scrollTop);
  program.onfocus = () => (isFree = false);
  program.onkeydown = (event) => {
    const { key, ctrlKey, metaKey, shiftKey, isComposing } = event;
    isFree ||= key === "Escape";
    if (ctrlKey || metaKey || shiftKey || isComposing || (key === "Tab" && isFree)) return;
    const line = program.value.slice(0, program.selectionStart).split("\n").at(-1); // up to the cursor
    const indent = line.match(/^ */)[0] + (line.trimEnd().endsWith(":") ? "    " : "");
    const typed = { Tab: " ".repeat(4 - (line.length % 4)), Enter: `\n${indent}` }[key];
    if (typed && document.execCommand("insertText", false, typed)) event.preventDefault();
  };
  stage.onsubmit = async (event) => {
    event.preventDefault();
    const done = run(), answer = await play(stage, "stage", program.value, number);
    const line = said.textContent.match(/\bline (\d+)/)?.[1];
    if (answer?.isRight) {
      stage.querySelector(".drawing").innerHTML = ""; // there is no failure to show
      said.value = answer.said;
    } else if (answer?.lines) said.append(` ${answer.said}`);
    done(answer?.lines ? answer.said : said.value, answer?.isRight);
    beside.hidden = beside.open = false;
    if (!line) return;
    const go = Object.assign(document.createElement("button"), { type: "button", textContent: `Show line ${line}` });
    go.onclick = () => show(Number(line));
    said.append(" ", go);
  };
  beside.hidden = !versionsOf(`stage ${number}`).length; // first one tries
  beside.ontoggle = async () => {
    const { lines = [] } = (beside.open && await request(beside, "compare", program.value, number)) || {};
    beside.querySelector("pre").innerHTML = each(lines, (line) => {
      const mark = { "-": "del", "+": "ins" }[line[0]] ?? "span";
      return `<${mark}>${escaped(line)}</${mark}>`;
    });
  };
  draw();
}
