// The editor of a stage's page: the kit tries a student's server in the worker of book.js
const stage = document.querySelector(".stage");

if (stage) {
  const { program, reset, show } = stage.elements, name = `stage ${stage.dataset.stage}`;
  const drawing = stage.querySelector(".drawing"), output = stage.querySelector("output");
  const set = (text) => [program.value, drawing.innerHTML, output.textContent] = [text, "", stored(name, text) && ""];
  stage.hidden = false;
  program.value = stored(name) ?? program.defaultValue;
  program.oninput = () => outdate(stage, stored(name, program.value));
  reset.onclick = () => set(program.defaultValue);
  show.onclick = () => set(stage.querySelector("template").content.textContent);
  stage.onsubmit = async (event) => {
    event.preventDefault();
    const answer = await play(stage, "stage", program.value, Number(stage.dataset.stage));
    if (answer?.isRight || !answer?.lines) drawing.innerHTML = "";
    if (answer?.lines) output.textContent = answer.isRight ? answer.said : `${output.textContent} ${answer.said}`;
  };
}
