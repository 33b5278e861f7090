// The editor of a stage's page: the kit tries a student's server in the worker of book.js
const stage = document.querySelector(".stage");

if (stage) {
  const { program, said } = stage.elements, { start, server } = stage.dataset, number = Number(stage.dataset.stage);
  const [gutter, compared] = stage.querySelectorAll(".gutter, .compared"), fold = stage.querySelector(".beside");
  const before = `stage ${number - 1}`, passed = newest(before, ([one]) => IS_PASSED.test(one));
  const starts = {
    ...(newest(before) && { [`Mine of ${before}`]: passed ?? newest(before) }),
    [`The book’s server of ${before}`]: start, [`The book’s server of stage ${number}: the solution`]: server,
  };
  const draw = () => {
    const count = program.value.split("\n").length;
    gutter.textContent = Array.from({ length: count }, (_, n) => n + 1).join("\n");
    if (!fold.open) return;
    const lines = difference(program.value, server);
    const isNear = (n) => lines.slice(Math.max(0, n - 3), n + 4).some(([sign]) => sign !== " ");
    compared.innerHTML = lines.map(([sign, line], n) => {
      if (!isNear(n)) return isNear(n - 1) ? "<span>  …</span>" : "";
      const mark = { "-": "del", "+": "ins" }[sign] ?? "span";
      return `<${mark}>${sign} ${escaped(line)}</${mark}>`;
    }).join("") || "They are the same.";
  };
  stage.hidden = false; // without scripts it is
  program.value = newest(`stage ${number}`) ?? passed ?? start;
  const work = keep(program, `stage ${number}`, starts, "server.py");
  program.addEventListener("input", () => { outdate(stage); draw(); });
  program.onscroll = () => (gutter.scrollTop = program.scrollTop);
  fold.ontoggle = draw;
  program.onkeydown = (event) => { // a new line begins where the last one did
    if (event.key !== "Enter" || event.ctrlKey || event.metaKey || event.isComposing) return;
    const line = program.value.slice(0, program.selectionStart).split("\n").at(-1);
    const indent = line.match(/^ */)[0] + (line.trimEnd().endsWith(":") ? "    " : "");
    if (document.execCommand("insertText", false, `\n${indent}`)) event.preventDefault();
  };
  const show = (line) => {
    const lines = program.value.split("\n"), from = lines.slice(0, line - 1).join("\n").length + (line > 1);
    program.focus();
    program.setSelectionRange(from, from + lines[line - 1].length);
    program.scrollTop = (program.scrollHeight / lines.length) * (line - 8);
  };
  stage.onsubmit = async (event) => {
    event.preventDefault();
    const answer = await play(stage, "stage", program.value, number);
    if (answer?.isRight) stage.querySelector(".drawing").innerHTML = ""; // there is no failure to show
    const line = said.textContent.match(/\bline (\d+)/)?.[1];
    if (answer?.lines && !answer.isRight) said.append(` ${answer.said}`);
    if (answer?.isRight) said.value = answer.said;
    work.ran(answer?.lines ? answer.said : said.value);
    if (!line) return;
    const go = Object.assign(document.createElement("button"), { type: "button", textContent: `Show line ${line}` });
    go.onclick = () => show(Number(line));
    said.append(" ", go);
  };
  draw();
}
