// The editor of a stage's page: the kit tries a student's server in the worker of book.js
const stage = document.querySelector(".stage");

if (stage) {
  // The browser keeps the student's work under this name
  const { program, reset, show, said } = stage.elements, name = `stage ${stage.dataset.stage}`;
  stage.hidden = false; // without scripts it is
  program.value = stored(name) ?? program.defaultValue;
  program.oninput = () => { stored(name, program.value); outdate(stage); };
  reset.onclick = show.onclick = ({ target: { value } }) => {
    [program.value, said.value] = [value, ""];
    program.oninput();
  };
  stage.onsubmit = async (event) => {
    event.preventDefault();
    const answer = await play(stage, "stage", program.value, Number(stage.dataset.stage));
    if (answer?.isRight) stage.querySelector(".drawing").innerHTML = ""; // there is no failure to show
    if (answer?.lines) said.value = answer.isRight ? answer.said : `${said.value} ${answer.said}`;
  };
}
